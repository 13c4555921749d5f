"""Processes are killed, stopped, cut off, delayed, and Redis emptied, by a schedule that a seed decides, under load.

    python -m tests.fault.chaos --minutes 30 --seed 7

near host   router-0 router-1 prefill-0 decode-0  ══ cable ══  prefill-1 decode-1   far host

Where network namespaces are not permitted all run on this host, and nothing is cut or delayed. Afterwards every
request must be accounted for, every text equal to an undisturbed one, and everything given back: see chaos_checks.py.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.embedded_redis import EmbeddedRedis
from loadtest.fleet import Fleet, free_port
from tests.fault import chaos_checks
from tests.fault.chaos_load import Load, catalogue, clean_run
from tests.netns import FAR, NEAR, Hosts, two_hosts, visit
from tests.tiny_model import make_tiny_model

CALM_S = (0.5, 2.5)  # between two disturbances
LASTS_S = (0.5, 3.0)
NUM_CLIENTS = 6
MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "head_dim": 32}


@dataclass
class Chaos:
    """A cluster, its load, and what is done to it. In one thread, but for the load and what `near` runs."""

    fleet: Fleet
    redis: EmbeddedRedis
    urls: dict[str, str]
    hosts: Hosts | None
    near: ThreadPoolExecutor
    chance: random.Random
    log: list[tuple[float, str]] = field(default_factory=list)
    router_deaths: list[tuple[str, float]] = field(default_factory=list)

    def disturb(self) -> None:
        """One thing breaks and is mended again."""
        ways: list[tuple[int, Callable[[], None]]] = [
            (4, self._kill_worker), (3, self._stop_worker), (1, self._restart_redis), (1, self._kill_router)
        ]  # fmt: skip
        if self.hosts is not None:
            ways += [(2, self._cut), (1, self._delay)]
        self.chance.choices([way for _, way in ways], [weight for weight, _ in ways])[0]()

    def calm(self) -> None:
        time.sleep(self.chance.uniform(*CALM_S))

    def _note(self, what: str) -> None:
        self.log.append((time.monotonic(), what))

    def _last(self) -> None:
        time.sleep(self.chance.uniform(*LASTS_S))

    def _worker(self) -> str:
        return self.chance.choice(self.fleet.workers())

    def _kill_worker(self) -> None:
        name = self._worker()
        self._note(f"kill {name}")
        self.fleet.kill(name)
        self._last()
        self.fleet.start(name)
        self.fleet.wait_ready(name)

    def _stop_worker(self) -> None:
        name = self._worker()
        self._note(f"stop {name}")
        self.fleet.signal(name, signal.SIGSTOP)
        self._last()
        self.fleet.signal(name, signal.SIGCONT)

    def _kill_router(self) -> None:
        name = self.chance.choice(sorted(self.urls))
        self._note(f"kill {name}")
        self.router_deaths.append((name, time.monotonic()))
        self.fleet.kill(name)
        self.fleet.start(name)
        self.fleet.wait_ready(name)
        self.router_deaths.append((name, time.monotonic()))

    def _restart_redis(self) -> None:
        self._note("restart redis")
        self.redis.stop()
        self._last()
        self.redis.start()

    def _cut(self) -> None:
        assert self.hosts is not None
        self._note("cut the cable")
        self.hosts.cable.is_cut = True
        self._last()
        self.hosts.cable.is_cut = False

    def _delay(self) -> None:
        assert self.hosts is not None
        self._note("delay and loss")
        self.hosts.cable.delay_s, self.hosts.cable.loss = 0.015, 0.01
        self._last()
        self.hosts.cable.delay_s = self.hosts.cable.loss = 0.0


@contextmanager
def _cluster(seed: int) -> Iterator[Chaos]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp")))
        hosts = _hosts(stack)
        server = stack.enter_context(EmbeddedRedis(folder))
        model = make_tiny_model(folder / "model", **MODEL)
        ip = shutil.which("ip") or "ip"
        shared = {
            "model": model, "kv_cache_bytes": 16 << 20, "num_threads": 1, "landing_slots": 4, "check_when_idle": True,
            "landing_slot_bytes": 256 << 10, "transfer_lease_s": 1.0, "local_prefill_max_tokens": 32,
            "transfer_security": "plaintext-trusted-network",
        }  # fmt: skip
        fleet = Fleet(folder, server.url, "chaos", shared)
        stack.callback(fleet.close)
        urls = {}
        for index in (0, 1):
            place = (hosts.near, NEAR) if index == 0 else (hosts.far, FAR) if hosts else ("", "")
            wrapper = (ip, "netns", "exec", place[0]) if hosts else ()
            own = {"host": "0.0.0.0", "advertise_host": place[1]} if hosts else {}
            for role in ("prefill", "decode"):
                fleet.add(role, f"{role}-{index}", wrapper=wrapper, **own)
            port, near = free_port(), (ip, "netns", "exec", hosts.near) if hosts else ()
            fleet.add("router", f"router-{index}", wrapper=near, port=port, auth="anonymous")
            urls[f"router-{index}"] = f"http://127.0.0.1:{port}"
        enter_near = (lambda: visit(hosts.near)) if hosts else (lambda: None)
        near_threads = stack.enter_context(ThreadPoolExecutor(4, "near", initializer=enter_near))
        fleet.wait_ready()
        yield Chaos(fleet, server, urls, hosts, near_threads, random.Random(seed))


def _hosts(stack: ExitStack) -> Hosts | None:
    try:
        return stack.enter_context(two_hosts())
    except pytest.skip.Exception as reason:
        print(f"nothing will be cut or delayed: {reason}")
        return None


def run(seconds: float, seed: int, num_clients: int = NUM_CLIENTS) -> tuple[str, list[str]]:
    """A report, and what is wrong: nothing, if all is well."""
    with _cluster(seed) as chaos:
        asked = catalogue(chaos.chance)
        in_near = chaos.near.submit
        clean = in_near(lambda: asyncio.run(clean_run(chaos.urls, asked))).result()
        warm = Load(chaos.urls, asked, clean, seed, num_clients)
        _run_for(chaos, warm, 3.0, lambda: time.sleep(0.2))
        before = chaos_checks.settled(chaos)
        load = Load(chaos.urls, asked, clean, seed, num_clients)

        def step() -> None:
            chaos.calm()
            chaos.disturb()

        _run_for(chaos, load, seconds, step)
        wrong = chaos_checks.accounting(chaos, load) + chaos_checks.given_back(chaos, before)
        return _report(chaos, load, seconds, seed, wrong), wrong


def _run_for(chaos: Chaos, load: Load, seconds: float, step: Callable[[], None]) -> None:
    running = chaos.near.submit(load.run)
    ends_at = time.monotonic() + seconds
    try:
        while time.monotonic() < ends_at:
            step()
    finally:
        load.stopping.set()
        running.result()


def _report(chaos: Chaos, load: Load, seconds: float, seed: int, wrong: list[str]) -> str:
    events = Counter(what.rstrip("01").rstrip("-") for _, what in chaos.log)
    lines = [f"chaos: seed {seed}, {seconds:.0f} s, {'two hosts' if chaos.hosts else 'one host'}"]
    lines += [f"  {number:4d} × {what}" for what, number in sorted(events.items())]
    lines += [f"requests: {load.num_sent}"]
    lines += [f"  {number:5d} {outcome}" for outcome, number in sorted(load.outcomes().items())]
    gaps = sorted(chaos_checks.longest_gap_s(entry.answer) for entry in load.entries if len(entry.answer.times) > 1)
    if gaps:
        shown = " ".join(f"p{p} {gaps[min(len(gaps) - 1, len(gaps) * p // 100)] * 1e3:.0f} ms" for p in (50, 95, 99))
        lines.append(f"longest pause of a stream: {shown}, most {gaps[-1] * 1e3:.0f} ms")
    lines += [f"WRONG: {each}" for each in wrong] or ["nothing wrong"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    given = parser.parse_args()
    report, wrong = run(given.minutes * 60, given.seed, given.clients)
    print(report)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
