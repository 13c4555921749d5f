"""Two questions to one pair of workers: how long small transfers take while a large one runs, and what an idle
connection costs. Answers with one JSON line."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Final

import torch

from loadtest.transfer.baton_peer import Path, Sender
from loadtest.transfer.cases import Case

NUM_SMALL: Final = 1000
SMALL_BLOCKS: Final = 2
LARGE_BLOCKS: Final = 12_000
MAX_LARGE: Final = 100
IDLE_S: Final = 5.0
# The large transfer is one of 422 MiB: over a hundred pieces of 4 MiB.
POOL: Final = Case("small and large", 36 << 10, LARGE_BLOCKS + SMALL_BLOCKS * NUM_SMALL)


@dataclass(frozen=True, slots=True)
class Waits:
    """Milliseconds from opening to commit, of all the small transfers."""

    p50_ms: float
    p99_ms: float
    max_ms: float


def waits_of(seconds: list[float]) -> Waits:
    ordered = sorted(seconds)
    at = [1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    return Waits(at[0], at[1], 1e3 * ordered[-1])


def small_ones(sender: Sender, prefix: str) -> list[float]:
    """Seconds of NUM_SMALL transfers that are all opened at once."""
    names = [f"{prefix}-{i}" for i in range(NUM_SMALL)]
    blocks = [list(range(SMALL_BLOCKS * i, SMALL_BLOCKS * (i + 1))) for i in range(NUM_SMALL)]
    targets = sender.reserve(names, blocks)
    under_way = [sender.start(*each) for each in zip(names, targets, blocks, strict=True)]
    return [sending.wait() for sending in under_way]


class LargeOnes:
    """One large transfer after another, in a thread of its own, until told to stop."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._ids = list(range(SMALL_BLOCKS * NUM_SMALL, POOL.num_blocks))
        self._names = [f"large-{i}" for i in range(MAX_LARGE)]
        self._targets = sender.reserve(self._names, [self._ids] * MAX_LARGE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for name, target in zip(self._names, self._targets, strict=True):
            if self._stop.is_set():
                return
            self.seconds.append(self._sender.start(name, target, self._ids).wait())


def main() -> None:
    path, slots, slot_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    sender = Sender(POOL, path, slots, slot_bytes)
    small_ones(sender, "warm")
    alone = small_ones(sender, "alone")
    large = LargeOnes(sender)
    large.start()
    beside = small_ones(sender, "beside")
    large.stop()
    before, remote_before = time.process_time(), sender.ask(("cpu",))
    time.sleep(IDLE_S)
    used, remote_used = time.process_time() - before, sender.ask(("cpu",)) - remote_before
    answer = {
        "small_beside_large": {
            "small_kib": SMALL_BLOCKS * POOL.block_bytes // 1024,
            "small_transfers_at_once": NUM_SMALL,
            "large_mib": LARGE_BLOCKS * POOL.block_bytes / 2**20,
            "alone": asdict(waits_of(alone)),
            "beside_large": asdict(waits_of(beside)),
            "large_s": large.seconds,
        },
        "idle": {"sender_core_share": used / IDLE_S, "receiver_core_share": remote_used / IDLE_S},
    }
    sys.stdout.write(json.dumps({"answer": answer}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
