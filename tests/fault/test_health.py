"""A real worker's process under a router's fleet: stopped, it gets nothing; going on, it is used again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import redis

from common.embedded_redis import EmbeddedRedis
from common.registry import decode_record, worker_key
from router.cluster.fleet import Fleet
from router.cluster.worker_session import SessionEvent
from tests.fault.test_worker_processes import worker_process

BOUND_S = 20.0


async def until(fleet: Fleet, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await fleet.wait_changed(0.1)


async def test_a_stopped_worker_is_silent_and_is_used_again_when_it_goes_on(tiny_model_folder: Path) -> None:
    with EmbeddedRedis() as server:
        async with worker_process("decode", "d0", tiny_model_folder, server) as process:
            with redis.Redis.from_url(server.url) as client:
                value = client.get(worker_key("default", "d0"))
            assert isinstance(value, bytes)
            fleet = Fleet("router-test", time.monotonic)
            try:
                fleet.apply_records({"d0": decode_record(value)})
                await until(fleet, lambda: bool(fleet.usable("decode")))
                process.signal(signal.SIGSTOP)
                await until(fleet, lambda: not fleet.usable("decode"))
                assert fleet.session_events["decode", SessionEvent.SILENT] == 1
                assert fleet.session_events.get(("decode", SessionEvent.LOST), 0) == 0, "a pause may still end"
                process.signal(signal.SIGCONT)
                await until(fleet, lambda: bool(fleet.usable("decode")))
            finally:
                await fleet.close()
