"""What faults cost in availability, and how many replicas a target asks for: pure; docs/AVAILABILITY.md uses it.

A fault of one of n workers hurts requests only as far as the others have no room for its share, until it is replaced;
and, for the moment until it is noticed, those that it had. A request counts as failed here when it ends with an error;
one that goes on elsewhere after a gap does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb
from typing import Final

MONTH_S: Final = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind, of each worker by itself. a_month: how often. detect_s: until no work goes there. recover_s: until it,
    or its replacement, gets work again, from the detection on."""

    name: str
    a_month: float
    detect_s: float
    recover_s: float

    @property
    def down_ratio(self) -> float:
        """Part of the time that a worker is away for it."""
        return min(1.0, self.a_month * (self.detect_s + self.recover_s) / MONTH_S)


def unavailable_ratio(num_workers: int, num_needed: int, down_ratio: float) -> float:
    """Part of the time that fewer than num_needed of num_workers are there, each away for down_ratio by itself."""
    up = 1 - down_ratio
    return sum(comb(num_workers, k) * up**k * down_ratio ** (num_workers - k) for k in range(num_needed))


def workers_for(target: float, num_needed: int, down_ratio: float) -> int:
    """The fewest workers of a role of which num_needed are there for `target` of the time (0.9995). Raises ValueError
    where no number helps."""
    if not 0 < target < 1 or num_needed < 1 or not 0 <= down_ratio < 0.5:
        raise ValueError(f"no answer for target {target}, {num_needed} needed, {down_ratio} away")
    num_workers = num_needed
    while unavailable_ratio(num_workers, num_needed, down_ratio) > 1 - target:
        num_workers += 1
    return num_workers


def budget_s(target: float, period_s: float = MONTH_S) -> float:
    """Seconds of a period that may be lost in all."""
    return (1 - target) * period_s


def rollout_s(num_workers: int, at_once: int, grace_s: float, start_s: float) -> float:
    """Of a role, drained and started anew at_once at a time."""
    return ceil(num_workers / at_once) * (grace_s + start_s)


def capacity_in_rollout(num_workers: int, at_once: int) -> float:
    """Part of the workers that is there meanwhile."""
    return max(0, num_workers - at_once) / num_workers
