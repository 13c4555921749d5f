"""What fault tests share: a fleet of processes with a small model, requests of many kinds, what must be left."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from common.embedded_redis import EmbeddedRedis
from loadtest.answers import Answer, stream_completion
from loadtest.fleet import Fleet, free_port
from tests.processes import becomes_true

PROMPT = [17, 5, 99, 23, 42, 7, 150, 31, 200, 11, 64, 3, 88]
# Slow enough that a stream lasts seconds, and in float32: equal text is equal to the last token.
SLOW = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "head_dim": 64}
HELD = ("baton_requests_running", "baton_requests_waiting", "baton_transfers_open")
SLOTS = tuple(f'baton_transfer_landing_slots{{state="{s}"}}' for s in ("granted", "landing", "quarantined"))


def bodies(max_tokens: int) -> dict[str, dict[str, Any]]:
    """One of each kind whose state has to survive a move. Their texts depend on nothing but themselves."""
    base = {"max_tokens": max_tokens, "min_tokens": max_tokens, "ignore_eos": True, "timeout": 120}
    return {
        "greedy": {**base, "prompt": PROMPT, "temperature": 0},
        "sampled": {**base, "prompt": PROMPT[::-1], "temperature": 1.1, "top_p": 0.95, "seed": 4, "logprobs": 2},
        "penalties": {
            **base, "prompt": PROMPT * 3, "temperature": 1.2, "seed": 21, "n": 3, "frequency_penalty": 0.4,
            "repetition_penalty": 1.1, "logprobs": 1,
        },
        "bias": {**base, "prompt": [9, *PROMPT], "temperature": 0.8, "seed": 8, "logit_bias": {"50": 3}},
    }  # fmt: skip


def with_stop_string(undisturbed: Answer, body: dict[str, Any]) -> dict[str, Any]:
    """The same request, ended by a string that its text has three quarters of the way, spread over two tokens."""
    text = undisturbed.choices[0].text
    at = len(text) * 3 // 4
    stop = next(text[i : i + 3] for i in range(at, len(text) - 3) if text.index(text[i : i + 3]) == i)
    return {**body, "stop": stop, "min_tokens": 0}


@contextmanager
def fleet_of(
    folder: Path, model: Path, *, prefill: int, decode: int, module: str = "deploy.cli", routers: int = 1, **shared: Any
) -> Iterator[tuple[Fleet, str]]:
    """Ready; with the routers' url. Parts are router-0…, prefill-0…, decode-0…"""
    with EmbeddedRedis() as server:
        settings = {
            "model": model, "block_size": 16, "kv_cache_bytes": 16 << 20, "num_threads": 1, "landing_slots": 4,
            "landing_slot_bytes": 256 << 10, "transfer_lease_s": 1.0, "check_when_idle": True, **shared,
        }  # fmt: skip
        fleet = Fleet(folder, server.url, "fault", settings)
        try:
            port = free_port()
            for role, number in (("prefill", prefill), ("decode", decode)):
                for index in range(number):
                    fleet.add(role, f"{role}-{index}", module=module)
            for index in range(routers):
                fleet.add("router", f"router-{index}", port=port, auth="anonymous", reuse_port=routers > 1)
            fleet.wait_ready()
            yield fleet, f"http://127.0.0.1:{port}"
        finally:
            fleet.close()


async def all_streams(
    url: str, asked: dict[str, dict[str, Any]], act: Callable[[], None] | None = None, *, after_tokens: int = 20
) -> dict[str, Answer]:
    """All at once; `act` is called as soon as each stream has brought after_tokens. It may block: children that it
    starts have to be this thread's.
    """
    reached: set[str] = set()
    acted = act is None
    async with httpx.AsyncClient(timeout=150) as client:

        async def one(name: str) -> Answer:
            async def on_event(answer: Answer) -> None:
                nonlocal acted
                if name not in reached and answer.num_tokens >= after_tokens * len(answer.choices):
                    reached.add(name)
                    if act is not None and len(reached) == len(asked):
                        acted = True
                        act()

            return await stream_completion(client, url, asked[name], on_event)

        answers = dict(zip(asked, await asyncio.gather(*map(one, asked)), strict=True))
    assert acted, "the streams were over before anything could happen to them"
    return answers


def gauges(url: str) -> dict[str, float]:
    """Every sample of a Prometheus page, by its name with labels; none where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if x and x[0] != "#")}


def worker_gauges(fleet: Fleet, name: str) -> dict[str, float]:
    record = fleet.record(name)
    return {} if record is None else gauges(record.metrics_url)


def busiest(fleet: Fleet, role: str) -> str:
    found = {name: worker_gauges(fleet, name).get("baton_requests_running", 0) for name in fleet.workers(role)}
    return max(found, key=found.__getitem__)


def is_idle(fleet: Fleet, name: str) -> bool:
    """Whether a worker holds nothing for anybody: every block is free or cached."""
    found = worker_gauges(fleet, name)
    if not found or any(found[key] for key in HELD) or any(found.get(key) for key in SLOTS):
        return False
    states = {state: found[f'baton_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "used")}
    record = fleet.record(name)
    return record is not None and states["used"] == 0 and sum(states.values()) == record.num_blocks


def assert_settles(fleet: Fleet, *names: str) -> None:
    for name in names or fleet.workers():
        assert becomes_true(lambda name=name: is_idle(fleet, name), 20), f"{name}: {worker_gauges(fleet, name)}"


def descriptors(pid: int) -> int:
    return psutil.Process(pid).num_fds()
