"""What must hold once calm has returned: every request accounted for, every text right, everything given back."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil
from redis import Redis

from loadtest.answers import Answer
from tests.fault.chaos_load import Load
from tests.fault.cluster import descriptors, gauges, is_idle

if TYPE_CHECKING:
    from tests.fault.chaos import Chaos

SETTLES_S = 30.0
# A pooled connection or thread more is no leak, nor is a buffer that has grown once.
MORE_DESCRIPTORS = 6
MORE_BYTES = 48 << 20


@dataclass(frozen=True)
class State:
    """By role the most descriptors and resident bytes of a process; and Redis' keys, epochs left out."""

    descriptors: dict[str, int]
    rss: dict[str, int]
    keys: frozenset[str]


def longest_gap_s(answer: Answer) -> float:
    times = [at for at, _ in answer.times]
    return max((b - a for a, b in pairwise(times)), default=0.0)


def accounting(chaos: Chaos, load: Load) -> list[str]:
    """Whole, or left by its client, or broken off with the router that carried it."""
    wrong = []
    if len(load.entries) != load.num_sent:
        wrong.append(f"{load.num_sent} requests were sent, {len(load.entries)} ended")
    for entry in load.entries:
        answer = entry.answer
        if entry.left or (answer.failure and _lost_its_router(chaos, entry.router, answer)):
            continue
        if answer.failure:
            wrong.append(f"{entry.name} by {entry.router} failed: {answer.failure}, after {_since(chaos, answer)}")
        elif answer.content != load.clean[entry.name]:
            wrong.append(f"{entry.name} has another text than undisturbed, after {_since(chaos, answer)}")
    return wrong


def _lost_its_router(chaos: Chaos, router: str, answer: Answer) -> bool:
    """Its connection broke, and the router died or was away meanwhile."""
    if not answer.failure.startswith(("broken", "cut off")):
        return False
    moments = [at for name, at in chaos.router_deaths if name == router]
    away = zip(moments[::2], moments[1::2], strict=True)
    return any(died <= answer.ended_at + 0.5 and answer.sent_at <= back for died, back in away)


def _since(chaos: Chaos, answer: Answer) -> str:
    earlier = [f"{what} {answer.ended_at - at:.1f} s before" for at, what in chaos.log if at <= answer.ended_at]
    return ", ".join(earlier[-2:]) or "nothing"


def settled(chaos: Chaos) -> State:
    """Once every worker and router is idle. Raises RuntimeError where that is not within SETTLES_S."""
    left = _wait(lambda: _busy(chaos))
    if left:
        raise RuntimeError(f"never idle: {left}")
    return _state(chaos)


def given_back(chaos: Chaos, before: State) -> list[str]:
    """What differs from the start."""
    left = _wait(lambda: _busy(chaos))
    if left:
        return [f"still busy after {SETTLES_S:.0f} s: {each}" for each in left]
    wrong: list[str] = _wait(lambda: _differences(before, _state(chaos)))
    return wrong


def _wait(problems: Any) -> list[str]:
    ends_at = time.monotonic() + SETTLES_S
    while (found := problems()) and time.monotonic() < ends_at:
        time.sleep(0.2)
    return list(found)


def _busy(chaos: Chaos) -> list[str]:
    ask = chaos.near.submit
    found = [name for name in chaos.fleet.workers() if not ask(is_idle, chaos.fleet, name).result()]
    for name, url in chaos.urls.items():
        page = ask(gauges, f"{url}/metrics").result()
        if not page or any(page[key] for key in ("baton_requests_running", "baton_requests_waiting")):
            found.append(name)
    return found


def _state(chaos: Chaos) -> State:
    roles = {part.role for part in chaos.fleet.parts.values()}
    pids = {role: [p.pid for p in chaos.fleet.parts.values() if p.role == role] for role in roles}
    with Redis.from_url(chaos.redis.url) as client:
        keys = {key.decode(errors="replace") for key in client.keys("*")}
    epochs = {record.epoch: "EPOCH" for name in chaos.fleet.workers() if (record := chaos.fleet.record(name))}
    live = re.compile("|".join(epochs) or "$^")
    return State(
        {role: max(map(descriptors, of_role)) for role, of_role in pids.items()},
        {role: max(psutil.Process(pid).memory_info().rss for pid in of_role) for role, of_role in pids.items()},
        frozenset(live.sub("EPOCH", key) for key in keys),
    )


def _differences(before: State, after: State) -> list[str]:
    wrong = []
    for role, number in after.descriptors.items():
        if number > before.descriptors[role] + MORE_DESCRIPTORS:
            wrong.append(f"{role}: {number} descriptors, {before.descriptors[role]} before")
    for role, rss in after.rss.items():
        if rss > before.rss[role] + MORE_BYTES:
            wrong.append(f"{role}: {rss >> 20} MiB resident, {before.rss[role] >> 20} before")
    if after.keys - before.keys:
        wrong.append(f"keys in Redis that were not there before: {sorted(after.keys - before.keys)}")
    return wrong
