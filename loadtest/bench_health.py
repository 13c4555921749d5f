"""How soon a worker's end is noticed, how soon one that stopped is used again, and how soon a new one is there.

    python -m loadtest.bench_health --model DIR [--rounds 5] [--busy-s 20]

One decode worker as a process, a router's fleet in this one. At the end the machine is overloaded, four busy processes
a core: who is taken for silent then is a false alarm.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from redis.asyncio import Redis

from common.die_with_parent import command as die_with_parent
from common.embedded_redis import EmbeddedRedis
from common.registry import decode_record, worker_key
from router.cluster.fleet import Fleet
from router.cluster.worker_session import SessionEvent

BOUND_S = 120.0
LOOK_S = 0.005
HOGS_A_CORE = 4


class Bench:
    """One worker, again and again."""

    def __init__(self, model: Path, redis_url: str, redis: Redis) -> None:
        self._model, self._url, self._redis = model, redis_url, redis
        self.fleet = Fleet("router-bench", time.monotonic)
        self.child: asyncio.subprocess.Process | None = None

    async def start(self) -> float:
        """Seconds from the process's start until it may be sent work."""
        began = time.monotonic()
        settings = {"model": self._model, "redis_url": self._url, "worker_id": "d0", "kv_cache_bytes": 64 << 20}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        argv = die_with_parent([sys.executable, "-P", "-m", "deploy.cli", "decode", *words])
        quiet = asyncio.subprocess.DEVNULL
        self.child = await asyncio.create_subprocess_exec(*argv, stdout=quiet, stderr=quiet)
        await self._until(self._is_usable)
        return time.monotonic() - began

    async def seconds_until(self, number: signal.Signals, *, usable: bool) -> float:
        """From the signal until the fleet does, or does not, use the worker."""
        if self.child is None:
            raise RuntimeError("not started")
        began = time.monotonic()
        os.kill(self.child.pid, number)
        async with asyncio.timeout(BOUND_S):
            while bool(self.fleet.usable("decode")) != usable:  # noqa: ASYNC110 (measured as it is seen)
                await asyncio.sleep(LOOK_S)
        return time.monotonic() - began

    async def close(self) -> None:
        await self.fleet.close()
        if self.child is not None and self.child.returncode is None:
            self.child.kill()
            await self.child.wait()

    async def _is_usable(self) -> bool:
        value = cast(bytes | None, await self._redis.get(worker_key("default", "d0")))
        if value is not None:
            self.fleet.apply_records({"d0": decode_record(value)})
        return bool(self.fleet.usable("decode"))

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not await condition():  # noqa: ASYNC110 (Redis can not call back)
                await asyncio.sleep(LOOK_S * 4)


def told(what: str, seconds: list[float]) -> str:
    return f"{what:<44} p50 {statistics.median(seconds):6.2f} s   max {max(seconds):6.2f} s   ({len(seconds)})"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def spin() -> None:
    while True:
        pass


async def measure(model: Path, rounds: int, busy_s: float) -> None:
    with EmbeddedRedis() as server:
        redis = Redis.from_url(server.url)
        bench = Bench(model, server.url, redis)
        stopped, resumed, killed, started = [], [], [], []
        try:
            for _ in range(rounds):
                started.append(await bench.start())
                stopped.append(await bench.seconds_until(signal.SIGSTOP, usable=False))
                resumed.append(await bench.seconds_until(signal.SIGCONT, usable=True))
                killed.append(await bench.seconds_until(signal.SIGKILL, usable=False))
                if bench.child is not None:
                    await bench.child.wait()
                await redis.flushall()
            say(told("stopped (SIGSTOP) until it gets no work", stopped))
            say(told("going on (SIGCONT) until it gets work", resumed))
            say(told("killed (SIGKILL) until it gets no work", killed))
            say(told("a new process until it gets work", started))
            await bench.start()
            before = bench.fleet.session_events.get(("decode", SessionEvent.SILENT), 0)
            hogs = [
                multiprocessing.Process(target=spin, daemon=True) for _ in range(HOGS_A_CORE * (os.cpu_count() or 1))
            ]
            for hog in hogs:
                hog.start()
            await asyncio.sleep(busy_s)
            for hog in hogs:
                hog.kill()
            alarms = bench.fleet.session_events.get(("decode", SessionEvent.SILENT), 0) - before
            say(f"false alarms in {busy_s:g} s beside {len(hogs)} busy processes: {alarms}")
        finally:
            await bench.close()
            await redis.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy-s", type=float, default=20.0)
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.rounds, given.busy_s))


if __name__ == "__main__":
    main()
