"""The search for the highest rate within an objective: doubling, then bisection, bounded in time. No I/O of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from loadtest.errors import BenchError
from loadtest.slo import Slo

# Below this part of the start there is nothing to find.
_FLOOR: Final = 1 / 256
_NEAR_MISS: Final = 0.1
LOST_CAUSE: Final = "the objective is out of reach"


@dataclass(slots=True)
class RateSearch:
    """Pure search over rates: doubles from `start` until a rate fails (halves, down to start / 256, if `start` itself
    fails), then bisects geometrically until best and failed lie within `tolerance` of each other. best: 0.0 while none
    has passed."""

    start: float
    max_rate: float
    tolerance: float = 0.05
    best: float = 0.0
    failed: float = math.inf

    def next_rate(self) -> float | None:
        """The rate to try; None when the answer is found or can't be."""
        if not self.best:
            if math.isinf(self.failed):
                return min(self.start, self.max_rate)
            return self.failed / 2 if self.failed / 2 >= self.start * _FLOOR else None
        if math.isinf(self.failed):
            return min(self.best * 2, self.max_rate) if self.best < self.max_rate else None
        return math.sqrt(self.best * self.failed) if self.failed > self.best * (1 + self.tolerance) else None

    def observe(self, rate: float, *, passed: bool) -> None:
        if passed:
            self.best = max(self.best, rate)
        else:
            self.failed = min(self.failed, rate)


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate tried.

    fraction: of its requests that met the objective. stopped: why it was ended early, "" if it was not; a lost cause
    is a failure, an interruption ends the search. client_saturated: the client, not the server, was the limit.
    report: the run's full report.
    """

    rate: float
    fraction: float
    report: dict[str, Any]
    stopped: str = ""
    client_saturated: bool = False


@dataclass(slots=True)
class SearchOutcome:
    """best: highest rate that passed, 0.0 for none; failed: lowest that did not, inf for none; ended: why."""

    best: float = 0.0
    failed: float = math.inf
    ended: str = ""
    probes: list[Probe] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """probe_s: length of a probe, longer at rates that would see fewer than min_requests in it."""

    slo: Slo
    fraction: float = 0.95
    start_rate: float = 1.0
    max_rate: float = 10_000.0
    tolerance: float = 0.05
    probe_s: float = 30.0
    min_requests: int = 20
    cool_down_s: float = 2.0
    max_time_s: float = 900.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise BenchError(f"--fraction must be above 0 and at most 1, not {self.fraction:g}")
        if not 0 < self.start_rate <= self.max_rate:
            raise BenchError(f"--start-rate must be above 0 and at most --max-rate, not {self.start_rate:g}")
        if not (self.tolerance > 0 and self.probe_s > 0 and self.max_time_s > 0 and self.cool_down_s >= 0):
            raise BenchError("--tolerance, --probe and --max-time must be above 0, --cool-down at least 0")

    def duration_s(self, rate: float) -> float:
        return max(self.probe_s, self.min_requests / rate)


class _EndedError(Exception):
    """Why the search can't go on."""


async def search(
    options: SearchOptions,
    probe: Callable[[float, int], Awaitable[Probe]],
    cool_down: Callable[[], Awaitable[None]],
    clock: Callable[[], float] = time.monotonic,
) -> SearchOutcome:
    """Drive a RateSearch with real (or simulated) probes; `probe` gets the rate and the probe's number.

    A near miss is tried once more and the mean of both decides: one noisy probe would lead the bisection astray.
    """
    deadline = clock() + options.max_time_s
    state = RateSearch(options.start_rate, options.max_rate, options.tolerance)
    outcome = SearchOutcome()

    async def fraction_at(rate: float) -> float:
        if outcome.probes and clock() + options.duration_s(rate) > deadline:
            raise _EndedError(f"time is up (--max-time {options.max_time_s:g} s)")
        tried = await probe(rate, len(outcome.probes))
        outcome.probes.append(tried)
        if tried.client_saturated:
            # Once may be a neighbour on the machine.
            await cool_down()
            tried = await probe(rate, len(outcome.probes))
            outcome.probes.append(tried)
        if tried.client_saturated:
            raise _EndedError(f"the client saturated at {rate:.3g}/s: the server may carry more")
        if tried.stopped and tried.stopped != LOST_CAUSE:
            raise _EndedError(tried.stopped)
        await cool_down()
        return 0.0 if tried.stopped else tried.fraction

    try:
        while (rate := state.next_rate()) is not None:
            fraction = await fraction_at(rate)
            if options.fraction - _NEAR_MISS <= fraction < options.fraction:
                fraction = (fraction + await fraction_at(rate)) / 2
            state.observe(rate, passed=fraction >= options.fraction)
        outcome.ended = _how_found(state)
    except _EndedError as e:
        outcome.ended = str(e)
    outcome.best, outcome.failed = state.best, state.failed
    return outcome


def _how_found(state: RateSearch) -> str:
    if not state.best:
        return f"no rate down to {state.failed:.3g}/s meets the objective"
    if math.isinf(state.failed):
        return f"the objective is met at the highest rate allowed (--max-rate {state.max_rate:g})"
    return f"found within {state.tolerance:.0%}"
