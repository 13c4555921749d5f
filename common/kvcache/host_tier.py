"""The second tier of the KV cache: content of blocks that the pool evicted, in host memory, found again by block hash.

    pool evicts a cached block ──keep──► a slot of the tier ──restore──► a fresh block of the pool
                                         │ LRU; pinned content last
                                         └──► dropped when the room is needed

Inclusive: restored content stays here too, so that its next eviction copies nothing. This file keeps the books; the
bytes are a BlockCopier's. Not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class BlockCopier(Protocol):
    """Copies whole blocks, all layers, between pool and host memory: block_ids[i] ↔ slots[i], in the engine's thread.

    A copy takes effect before anything that the engine does to these blocks afterwards. On a CPU it is done on return;
    a GPU may queue it on the stream that steps run on, from and to pinned memory.
    """

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None: ...

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """num_used counts slots with content; copies count blocks since the start."""

    num_slots: int = 0
    num_used: int = 0
    num_saved_total: int = 0
    num_loaded_total: int = 0


class HostTier:
    """`num_slots` blocks of host memory.

    Pins say that content will be wanted: a pinned hash is not dropped while it is here, and finds room when its block
    is evicted. There are never more pinned hashes than slots.
    """

    def __init__(self, num_slots: int, copier: BlockCopier) -> None:
        if num_slots < 1:
            raise ValueError(f"a host tier needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self._copier = copier
        self._free = list(range(num_slots - 1, -1, -1))
        # Content by hash: what may be dropped in order of last use, oldest first, and what is pinned.
        self._unpinned: dict[bytes, int] = {}
        self._pinned: dict[bytes, int] = {}
        self._pins: Counter[bytes] = Counter()
        self._num_saved_total = 0
        self._num_loaded_total = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._unpinned or block_hash in self._pinned

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned)

    @property
    def stats(self) -> HostTierStats:
        return HostTierStats(self.num_slots, len(self), self._num_saved_total, self._num_loaded_total)

    def can_pin(self, hashes: Iterable[bytes]) -> bool:
        """Whether `pin` would succeed."""
        return len(self._pins) + len(set(hashes) - self._pins.keys()) <= self.num_slots

    def pin(self, hashes: Sequence[bytes]) -> bool:
        """One pin more on each of these distinct hashes, whether their content is here yet or not; all, or none and
        False where they don't fit."""
        if not self.can_pin(hashes):
            return False
        for block_hash in hashes:
            self._pins[block_hash] += 1
            slot = self._unpinned.pop(block_hash, None)
            if slot is not None:
                self._pinned[block_hash] = slot
        return True

    def unpin(self, hashes: Iterable[bytes]) -> None:
        """Give back what `pin` took. Raises ValueError at the first hash that has no pin."""
        for block_hash in hashes:
            if self._pins[block_hash] <= 0:
                raise ValueError("a block's content is unpinned more often than it was pinned")
            self._pins[block_hash] -= 1
            if not self._pins[block_hash]:
                del self._pins[block_hash]
                slot = self._pinned.pop(block_hash, None)
                if slot is not None:
                    self._unpinned[block_hash] = slot

    def keep(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> list[bytes]:
        """Copy these blocks' content out, where it is not here already and there is room for it.

        Returns the hashes that were dropped for it, and those for which there was none.
        """
        saved: dict[bytes, tuple[int, int]] = {}
        dropped = []
        for block_hash, block_id in zip(hashes, block_ids, strict=True):
            if self._touch(block_hash):
                continue
            slot = self._free.pop() if self._free else None
            if slot is None and self._unpinned:
                oldest = next(iter(self._unpinned))
                slot = self._unpinned.pop(oldest)
                dropped.append(oldest)
                saved.pop(oldest, None)
            if slot is None:
                dropped.append(block_hash)
                continue
            (self._pinned if block_hash in self._pins else self._unpinned)[block_hash] = slot
            saved[block_hash] = (block_id, slot)
        if saved:
            self._copier.save([b for b, _ in saved.values()], [s for _, s in saved.values()])
            self._num_saved_total += len(saved)
        return dropped

    def restore(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Copy content that is here into these blocks. Raises KeyError for what is not."""
        slots = []
        for block_hash in hashes:
            slot = self._pinned.get(block_hash)
            slots.append(self._unpinned[block_hash] if slot is None else slot)
            self._touch(block_hash)
        if slots:
            self._copier.load(slots, block_ids)
            self._num_loaded_total += len(slots)

    def check_integrity(self, expected_pins: Mapping[bytes, int] | None = None) -> None:
        """Raises RuntimeError where slots are lost or shared, or pins differ from what their owners know of."""
        slots = [*self._free, *self._unpinned.values(), *self._pinned.values()]
        if sorted(slots) != list(range(self.num_slots)):
            raise RuntimeError("slots of the host tier are lost, or in two places")
        if not self._pinned.keys() <= self._pins.keys() or self._unpinned.keys() & self._pins.keys():
            raise RuntimeError("the host tier's pins and content disagree")
        if expected_pins is not None and self._pins != expected_pins:
            raise RuntimeError(f"{len(self._pins)} hashes are pinned, their owners know of {len(expected_pins)}")

    def _touch(self, block_hash: bytes) -> bool:
        """Whether the content is here; then it is the most recently used."""
        if block_hash in self._pinned:
            return True
        slot = self._unpinned.pop(block_hash, None)
        if slot is None:
            return False
        self._unpinned[block_hash] = slot
        return True
