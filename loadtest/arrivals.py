"""When requests are due: pure schedules, fixed before the first request is sent.

Open loop: the next request is due whether or not the last one has been answered, so a slow server cannot slow its own
load down. Closed loop: `concurrency` users, each sending when its last answer is complete.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from loadtest.errors import BenchError

ArrivalKind = Literal["poisson", "gamma", "constant", "trace", "closed"]
ARRIVAL_KINDS: Final[tuple[ArrivalKind, ...]] = ("poisson", "gamma", "constant", "trace", "closed")


@dataclass(frozen=True, slots=True)
class Arrival:
    """
    rate: sessions per second (poisson, gamma, constant). shape: of the gamma gaps; below 1 bursts, 1 is Poisson, above
    1 is more even (coefficient of variation 1/√shape; vLLM calls it burstiness). speed: a trace of one hour takes
    1/speed hours. concurrency: users of the closed loop.
    """

    kind: ArrivalKind
    rate: float = 0.0
    shape: float = 1.0
    speed: float = 1.0
    concurrency: int = 0

    def __post_init__(self) -> None:
        if self.kind in ("poisson", "gamma", "constant") and not (0 < self.rate < math.inf):
            raise BenchError(f"arrival {self.kind}: rate must be above 0, not {self.rate:g}; give --rate")
        if not (0 < self.shape < math.inf):
            raise BenchError(f"arrival {self.kind}: shape must be above 0, not {self.shape:g}")
        if not (0 < self.speed < math.inf):
            raise BenchError(f"arrival {self.kind}: speed must be above 0, not {self.speed:g}")
        if self.kind == "closed" and self.concurrency < 1:
            raise BenchError(f"arrival closed: concurrency must be at least 1, not {self.concurrency}")

    @property
    def is_open(self) -> bool:
        return self.kind != "closed"

    def offsets(self, seed: str | int) -> Iterator[float]:
        """Endless due times in seconds from the start of the run; only for kinds that make their own times."""
        rng = random.Random(f"arrivals/{seed}")
        if self.kind == "poisson":
            return _accumulate(-math.log1p(-rng.random()) / self.rate for _ in _forever())
        if self.kind == "gamma":
            scale = 1.0 / (self.rate * self.shape)
            return _accumulate(rng.gammavariate(self.shape, scale) for _ in _forever())
        if self.kind == "constant":
            return (i / self.rate for i in _forever())
        raise BenchError(f"arrival {self.kind} has no times of its own")

    def describe(self) -> dict[str, float | int | str]:
        """The fields that matter for this kind, for the report."""
        fields: dict[ArrivalKind, tuple[str, ...]] = {
            "poisson": ("rate",),
            "gamma": ("rate", "shape"),
            "constant": ("rate",),
            "trace": ("speed",),
            "closed": ("concurrency",),
        }
        return {"kind": self.kind, **{name: getattr(self, name) for name in fields[self.kind]}}


def _forever() -> Iterator[int]:
    i = 0
    while True:
        yield i
        i += 1


def _accumulate(gaps: Iterator[float]) -> Iterator[float]:
    now = 0.0
    for gap in gaps:
        now += gap
        yield now
