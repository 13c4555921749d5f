"""What a worker's index entries in Redis should be: the sets of hashes, and the changes that Redis has not heard of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.kvcache.prefix_cache import CacheChanges, NetChanges


@dataclass(frozen=True, slots=True)
class Batch:
    """What one script call changes: 16-byte hashes."""

    removed: Sequence[bytes]
    added: Sequence[bytes]
    host_removed: Sequence[bytes]
    host_added: Sequence[bytes]


class _Tier:
    """A mirror of one set, bounded: what comes when it is full is not published, and so never taken back either."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self.held: set[bytes] = set()
        self.pending = NetChanges()

    def change(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> int:
        """Returns how many of `stored` there was no room for."""
        for block_hash in evicted:
            if block_hash in self.held:
                self.held.discard(block_hash)
                self.pending.record(block_hash, present=False)
        num_left_out = 0
        for block_hash in stored:
            if block_hash in self.held:
                continue
            if len(self.held) >= self._max_blocks:
                num_left_out += 1
                continue
            self.held.add(block_hash)
            self.pending.record(block_hash, present=True)
        return num_left_out


class BlockTiers:
    """Belongs to the event loop. max_blocks: bound of each tier's set."""

    def __init__(self, max_blocks: int) -> None:
        self._all = _Tier(max_blocks)
        self._host = _Tier(max_blocks)
        self.num_left_out = 0

    @property
    def num_held(self) -> tuple[int, int]:
        """Blocks in any tier; blocks in the host tier."""
        return len(self._all.held), len(self._host.held)

    @property
    def num_published(self) -> tuple[int, int]:
        """The same, as Redis should have them now: pending changes are not there yet."""
        return tuple(len(tier.held) - tier.pending.growth for tier in (self._all, self._host))  # type: ignore[return-value]

    @property
    def has_changes(self) -> bool:
        return bool(len(self._all.pending) or len(self._host.pending))

    def add(self, changes: CacheChanges) -> None:
        self.num_left_out += self._all.change(changes.stored, changes.evicted)
        self._host.change(changes.host_stored, changes.host_evicted)

    def take_changes(self) -> Batch:
        changes, host_changes = self._all.pending.take(), self._host.pending.take()
        return Batch(changes.evicted, changes.stored, host_changes.evicted, host_changes.stored)

    def take_all(self) -> Batch:
        """Everything that is held; pending changes are part of it."""
        self.take_changes()
        return Batch((), list(self._all.held), (), list(self._host.held))
