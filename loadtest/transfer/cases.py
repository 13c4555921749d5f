"""What is moved: sets of equal blocks, out of one pool and into another, both far larger than a cache.

Also how the bench and the process that measures one peer talk: the bench writes a number of seconds, the peer runs the
case for so long and answers with a JSON line. Only the standard library and numpy: NIXL runs in a venv of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

KIB: Final = 1 << 10
MIB: Final = 1 << 20
MIN_RUNS: Final = 3
# The first ones connect, and touch memory for the first time.
WARM_UP_RUNS: Final = 3
# Beyond what two last-level caches of common servers' cores hold, and little enough for a laptop.
MIN_POOL_BYTES: Final = 512 * MIB
LARGEST_BLOCK_BYTES: Final = 2 * MIB

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Case:
    """num_blocks blocks of block_bytes each; a message is cut into blocks of at most 2 MiB."""

    name: str
    block_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def pool_blocks(self) -> int:
        """Whole sets, so that each run takes blocks that have not been touched lately."""
        sets = max(1, MIN_POOL_BYTES // self.num_bytes)
        return sets * self.num_blocks

    def ids(self, run: int, seed: int) -> Ids:
        """The blocks of one run: scattered over the pool, another set each time."""
        order = np.random.default_rng(seed).permutation(self.pool_blocks)
        start = run * self.num_blocks % self.pool_blocks
        return order[start : start + self.num_blocks]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        return Case(**json.loads(text))


def message(num_bytes: int) -> Case:
    block = min(num_bytes, LARGEST_BLOCK_BYTES)
    size = f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"
    return Case(size, block, num_bytes // block)


def paged_set(num_blocks: int, block_bytes: int) -> Case:
    size = f"{block_bytes // MIB} MiB" if block_bytes >= MIB else f"{block_bytes // KIB} KiB"
    return Case(f"{num_blocks} x {size}", block_bytes, num_blocks)


CASES: Final = (
    message(64 * KIB),
    message(MIB),
    message(16 * MIB),
    message(256 * MIB),
    paged_set(512, 36 * KIB),
    paged_set(512, 2 * MIB),
)


def serve(run: Callable[[int], float]) -> None:
    """A peer's main loop. run(i): move the case's blocks once, with the ids of run i; returns the seconds it took."""
    for count in range(WARM_UP_RUNS):
        run(count)
    _say({"ready": True})
    count = WARM_UP_RUNS
    for line in sys.stdin:
        seconds: list[float] = []
        end = time.perf_counter() + float(line)
        while len(seconds) < MIN_RUNS or time.perf_counter() < end:
            seconds.append(run(count))
            count += 1
        _say({"seconds": seconds})


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
