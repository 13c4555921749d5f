"""One part of a cluster in this process: router, prefill or decode worker, until a signal ends it."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

from common.config import Settings
from common.cores import give_way
from common.errors import StartupError
from common.telemetry import configure_logging, get_logger
from deploy.cluster_plan import Role
from deploy.model_folder import resolve_model

Run = Callable[[Settings], Awaitable[None]]


def run_role(role: Role, settings: Settings) -> NoReturn:
    """Ends the process when the part has stopped. Raises StartupError where it can't start."""
    import uvloop

    worker_id = "" if role == "router" else settings.worker_id or f"{role}-{secrets.token_hex(4)}"
    configure_logging(settings.log_level, settings.log_format, role, worker_id)
    log = get_logger(__name__)
    if not settings.redis_url.get_secret_value():
        raise StartupError(
            f"`baton {role}` needs a Redis that all parts share: give --redis-url redis://HOST:6379 "
            "(or use `baton serve`, which starts one)"
        )
    # Until the part handles signals itself. As a container's first process it would else not hear of them at all.
    signal.signal(signal.SIGTERM, _end_at_once)
    give_way(settings.nice)
    model = resolve_model(settings.model, lambda line: log.info(line))
    log.info("loading libraries")
    run = _entry(role)
    uvloop.run(_awaited(run, settings.model_copy(update={"model": str(model), "worker_id": worker_id})))
    _leave()


def _end_at_once(number: int, frame: object) -> NoReturn:
    """Nothing is shared or announced yet."""
    os._exit(128 + number)


def _leave() -> NoReturn:
    """End without the interpreter's teardown: freeing gigabytes tensor by tensor takes a second that nobody has."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _awaited(run: Run, settings: Settings) -> None:
    await run(settings)


def _entry(role: Role) -> Run:
    """The part's run(). Imported here: torch takes a second, and a wrong setting should be told before."""
    if role == "router":
        from router.app import run as run_router

        return run_router
    if role == "prefill":
        from prefill_service.app import run as run_prefill

        return run_prefill
    from decode_service.app import run as run_decode

    return run_decode
