"""A whole cluster on one machine: Redis, a router, prefill and decode workers, each a process of its own.

    baton serve ─┬─ redis-server        Unix socket in the run directory (unless redis_url names another)
                 ├─ baton router        the public HTTP and gRPC ports
                 ├─ baton prefill  × N  loopback, free ports, found by the registry
                 └─ baton decode   × M

Start: all at once; ready when every worker is in the registry and the router's /ready says 200. Stop: the router first,
so that running requests may end while the workers live; then the workers, then Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.config import ENV_PREFIX
from common.embedded_redis import answers_ping, redis_command, redis_socket_path, unix_url
from common.errors import StartupError
from common.redis_client import RedisTimeouts, connect
from common.registry import worker_key
from deploy.child_log import last_event
from deploy.cluster_plan import Part, to_toml
from deploy.restart_policy import RestartPolicy
from deploy.supervisor import Child, ChildSpec, ChildState, GaveUpError

READY_DEADLINE_S: Final = 900.0
REDIS_DEADLINE_S: Final = 10.0
POLL_S: Final = 0.1
PROBE_TIMEOUT_S: Final = 2.0
# Bounds of stopping, one after the other, the router's on top of the grace: with the default of 3 s, less than 5 s.
ROUTER_STOP_S: Final = 0.3
WORKER_STOP_S: Final = 0.9
REDIS_STOP_S: Final = 0.3

PartCommand = Callable[[Part, Path], Sequence[str]]


class EmbeddedRedisPart:
    """The cluster's own Redis as a supervised child. stop() must be awaited, whatever happened."""

    def __init__(self, run_dir: Path, policy: RestartPolicy, on_give_up: Callable[[GaveUpError], None]) -> None:
        self._stack = contextlib.ExitStack()
        self._socket = redis_socket_path(run_dir, self._stack)
        self.url = unix_url(self._socket)
        spec = ChildSpec("redis", redis_command(self._socket), run_dir / "redis.log")
        self.child = Child(spec, policy, on_give_up)

    async def start(self) -> None:
        """Returns once PING is answered. Raises StartupError after a deadline."""
        self.child.start(child_environment())
        for _ in range(int(REDIS_DEADLINE_S / POLL_S * 10)):
            if answers_ping(self._socket):
                return
            await asyncio.sleep(POLL_S / 10)
        raise StartupError(f"the embedded Redis does not answer: see {self.child.spec.log_path}")

    async def stop(self) -> None:
        """May be called more than once."""
        await self.child.stop(REDIS_STOP_S)
        self._stack.close()


class LocalCluster:
    """Owns the children. Use from one event loop in the main thread; stop() must be awaited, whatever happened.

    on_give_up: called when a part can't be kept alive. command: the argv of a part, given its settings file.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        run_dir: Path,
        policy: RestartPolicy,
        on_give_up: Callable[[GaveUpError], None],
        command: PartCommand | None = None,
    ) -> None:
        self._parts = parts
        self._run_dir = run_dir
        self._policy = policy
        self._on_give_up = on_give_up
        self._command = command or part_command
        self.children: dict[str, Child] = {}

    def start(self) -> None:
        """Start router and workers; Redis must answer already. Returns at once."""
        for part in self._parts:
            config = self._run_dir / f"{part.name}.toml"
            try:
                config.touch(mode=0o600)
                config.write_text(to_toml(part.settings), encoding="utf-8")
            except OSError as error:
                raise StartupError(f"can't write {config}: {error.strerror}; make room or set TMPDIR") from None
            spec = ChildSpec(part.name, self._command(part, config), self._run_dir / f"{part.name}.log")
            child = Child(spec, self._policy, self._on_give_up)
            self.children[part.name] = child
            child.start(child_environment())

    async def ready(self, say: Callable[[str, str, bool], None]) -> None:
        """Returns when all parts serve. Raises TimeoutError after READY_DEADLINE_S.

        say(part, what it does, whether it is ready) is called whenever one was looked at.
        """
        router = next(part for part in self._parts if part.role == "router")
        host, port = probe_host(str(router.settings.get("host", "127.0.0.1"))), int(router.settings["port"])
        waiting = {part.name: part for part in self._parts if part is not router}
        waiting[router.name] = router  # last: it serves by the workers
        async with asyncio.timeout(READY_DEADLINE_S), _redis_client(router) as redis:
            while waiting:
                for name, part in list(waiting.items()):
                    if (part is not router or len(waiting) == 1) and await self._serves(part, redis, host, port):
                        say(name, "ready", True)
                        del waiting[name]
                    else:
                        say(name, last_event(self.children[name].spec.log_path) or "starting", False)
                await asyncio.sleep(POLL_S)

    async def _serves(self, part: Part, redis: Redis, host: str, port: int) -> bool:
        if self.children[part.name].state is not ChildState.RUNNING:
            return False
        if part.role == "router":
            return await asyncio.to_thread(is_ready, host, port)
        try:
            return bool(await redis.exists(worker_key(str(part.settings.get("cluster", "default")), part.worker_id)))
        except RedisError:
            return False

    async def stop(self, grace_s: float) -> None:
        """End the router, which gives running requests grace_s, then the workers. May be called more than once."""
        by_role = [(part.role, self.children[part.name]) for part in self._parts if part.name in self.children]
        await asyncio.gather(*(child.stop(grace_s + ROUTER_STOP_S) for role, child in by_role if role == "router"))
        await asyncio.gather(*(child.stop(WORKER_STOP_S) for role, child in by_role if role != "router"))

    def kill(self) -> None:
        """SIGKILL to all, now; stop() must still be awaited."""
        for child in self.children.values():
            child.kill()


def part_command(part: Part, config: Path) -> list[str]:
    """`baton ROLE --config FILE` by this interpreter. -P: no folder in the current directory shadows a module."""
    return [sys.executable, "-P", "-m", "deploy.cli", part.role, "--config", str(config)]


def child_environment() -> dict[str, str]:
    """Ours, less BATON_*: those are in the children's settings files, and would override them."""
    return {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}


def probe_host(host: str) -> str:
    """Where to reach, from this machine, what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def is_ready(host: str, port: int) -> bool:
    """Whether GET /ready is 200. Never raises."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def _redis_client(router: Part) -> AsyncIterator[Redis]:
    timeouts = RedisTimeouts(connect_s=PROBE_TIMEOUT_S, answer_s=PROBE_TIMEOUT_S)
    client = connect(str(router.settings["redis_url"]), timeouts)
    try:
        yield client
    finally:
        await client.aclose()
