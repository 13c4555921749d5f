"""Which blocks hold which content: block hash → block id, and what changed since somebody last asked.

A hash enters only after its block's KV was computed or verified, and leaves when the pool evicts the block. Equal
content may lie in two blocks (two sequences computed it at once); the first keeps the hash, the second stays private
and becomes empty with its sequence. Not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.kvcache.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Net difference between two moments: no hash is in both. 16-byte block hashes."""

    stored: Sequence[bytes]
    evicted: Sequence[bytes]


class NetChanges:
    """Adds up changes of a set. What comes and goes again cancels out, so the size stays ≤ twice the set's."""

    def __init__(self) -> None:
        self._present: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._present)

    @property
    def growth(self) -> int:
        """By how much these changes make the set larger. O(len)."""
        num_stored = sum(self._present.values())
        return 2 * num_stored - len(self._present)

    def record(self, block_hash: bytes, *, present: bool) -> None:
        """`block_hash` was added to the set, or removed from it."""
        if self._present.pop(block_hash, present) == present:
            self._present[block_hash] = present

    def add(self, changes: CacheChanges) -> None:
        for block_hash in changes.evicted:
            self.record(block_hash, present=False)
        for block_hash in changes.stored:
            self.record(block_hash, present=True)

    def take(self) -> CacheChanges:
        present, self._present = self._present, {}
        return CacheChanges(
            stored=[block_hash for block_hash, is_there in present.items() if is_there],
            evicted=[block_hash for block_hash, is_there in present.items() if not is_there],
        )


class PrefixCache:
    """Full blocks by hash, on top of `pool`, whose evictions it follows. References belong to the callers."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._changes = NetChanges()
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def hashes(self) -> Iterable[bytes]:
        return self._block_by_hash.keys()

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that is cached. The caller owns one new reference to each."""
        block_ids = []
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        self._pool.acquire(block_ids)
        return block_ids

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """This referenced block's KV is final and has this content. False where another block has the hash already.

        Raises ValueError if the block is registered under another hash.
        """
        known = self._hash_by_block.get(block_id)
        if known is not None:
            if known != block_hash:
                raise ValueError(f"block {block_id} is cached already, with other content")
            return True
        if block_hash in self._block_by_hash:
            return False
        self._pool.retain(block_id)
        self._block_by_hash[block_hash] = block_id
        self._hash_by_block[block_id] = block_hash
        self._changes.record(block_hash, present=True)
        return True

    def take_changes(self) -> CacheChanges | None:
        """What was stored and evicted since the last call; None where nothing was. Bounded by twice the pool."""
        return self._changes.take() if len(self._changes) else None

    def check_integrity(self) -> None:
        """Raises RuntimeError where the two maps, or cache and pool, disagree."""
        if len(self._block_by_hash) != len(self._hash_by_block):
            raise RuntimeError("the prefix cache's maps differ in size")
        for block_id in range(self._pool.num_blocks):
            block_hash = self._hash_by_block.get(block_id)
            if (block_hash is not None) != self._pool.is_retained(block_id):
                raise RuntimeError(f"block {block_id}: pool and prefix cache disagree on whether it is cached")
            if block_hash is not None and self._block_by_hash.get(block_hash) != block_id:
                raise RuntimeError(f"block {block_id} is cached under a hash that points elsewhere")

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_by_block.pop(block_id)
        del self._block_by_hash[block_hash]
        self._changes.record(block_hash, present=False)
