"""Which blocks hold which content: block hash → block id or host tier, and what changed since somebody last asked.

A hash enters only after its block's KV was computed or verified, and leaves when the pool evicts the block. Equal
content may lie in two blocks (two sequences computed it at once); the first keeps the hash, the second stays private
and becomes empty with its sequence. With a host tier, what the pool evicts moves there, and `allocate` brings it back.
Not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.kvcache.block_pool import BlockPool
from common.kvcache.host_tier import HostTier, HostTierStats


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Net difference between two moments: no hash is in both of a pair. 16-byte block hashes.

    stored, evicted: of what this worker holds, wherever. host_stored, host_evicted: of what its host tier holds, be it
    in the pool as well or not.
    """

    stored: Sequence[bytes]
    evicted: Sequence[bytes]
    host_stored: Sequence[bytes] = ()
    host_evicted: Sequence[bytes] = ()


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


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks for a sequence, in order, with one reference each that the caller owns. The first num_cached hold their
    content; num_restored of these came from the host tier."""

    block_ids: list[int]
    num_cached: int
    num_restored: int


class PrefixCache:
    """Full blocks by hash, on top of `pool`, whose evictions it follows. References belong to the callers.

    host: where evicted content goes; None: it is gone.
    """

    def __init__(self, pool: BlockPool, host: HostTier | None = None) -> None:
        self._pool = pool
        self._host = host
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._changes = NetChanges()
        self._host_changes = NetChanges()
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_by_hash)

    @property
    def host(self) -> HostTier | None:
        return self._host

    @property
    def host_stats(self) -> HostTierStats:
        return HostTierStats() if self._host is None else self._host.stats

    def hashes(self) -> Iterable[bytes]:
        """Of the content that lies in the pool."""
        return self._block_by_hash.keys()

    def block_of(self, block_hash: bytes) -> int | None:
        """The block of the pool that has this content."""
        return self._block_by_hash.get(block_hash)

    def allocate(self, hashes: Sequence[bytes], num_blocks: int, keep_free: int = 0) -> Allocation | None:
        """`num_blocks` ≥ len(hashes) blocks, of which the longest leading run of `hashes` that is cached comes filled.

        All or none: None where fewer than keep_free blocks would be free afterwards. What only the host tier has is
        copied into fresh blocks before this returns.
        """
        found = self._find(hashes)
        in_host = [block_hash for block_hash, block_id in zip(hashes, found, strict=False) if block_id is None]
        # While others are evicted into the tier, what is to be restored must not be dropped from it.
        if self._host is not None and in_host and not self._host.pin(in_host):
            del found[found.index(None) :]
            in_host = []
        in_pool = [block_id for block_id in found if block_id is not None]
        self._pool.acquire(in_pool)
        num_fresh = num_blocks - len(in_pool)
        fresh = self._pool.allocate(num_fresh) if num_fresh + keep_free <= self._pool.num_free else None
        if self._host is not None and in_host:
            if fresh is not None:
                self._restore(self._host, in_host, fresh[: len(in_host)])
            self._host.unpin(in_host)
        if fresh is None:
            self._pool.release(in_pool)
            return None
        rest = iter(fresh)
        block_ids = [next(rest) if block_id is None else block_id for block_id in found]
        return Allocation([*block_ids, *rest], len(found), len(in_host))

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that the pool has. The caller owns a new reference to each."""
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
        self._enter(block_id, block_hash)
        if self._host is None or block_hash not in self._host:
            self._changes.record(block_hash, present=True)
        return True

    def take_changes(self) -> CacheChanges | None:
        """What was stored and evicted since the last call; None where nothing was. Bounded by twice pool and tier."""
        if not len(self._changes) and not len(self._host_changes):
            return None
        held, in_host = self._changes.take(), self._host_changes.take()
        return CacheChanges(held.stored, held.evicted, in_host.stored, in_host.evicted)

    def check_integrity(self, expected_pins: Mapping[bytes, int] | None = None) -> None:
        """Raises RuntimeError where the two maps, or cache, pool and host tier, disagree. expected_pins: by hash, what
        the owners know of."""
        if self._host is not None:
            self._host.check_integrity(expected_pins)
        if len(self._block_by_hash) != len(self._hash_by_block):
            raise RuntimeError("the prefix cache's maps differ in size")
        for block_id in range(self._pool.num_blocks):
            block_hash = self._hash_by_block.get(block_id)
            if (block_hash is not None) != self._pool.is_retained(block_id):
                raise RuntimeError(f"block {block_id}: pool and prefix cache disagree on whether it is cached")
            if block_hash is not None and self._block_by_hash.get(block_hash) != block_id:
                raise RuntimeError(f"block {block_id} is cached under a hash that points elsewhere")

    def _find(self, hashes: Sequence[bytes]) -> list[int | None]:
        """The longest leading run that is here: each one's block, or None where only the host tier has it."""
        found: list[int | None] = []
        for block_hash in hashes:
            block_id = self._block_by_hash.get(block_hash)
            if block_id is None and (self._host is None or block_hash not in self._host):
                break
            found.append(block_id)
        return found

    def _restore(self, host: HostTier, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Fill these fresh blocks from the host tier, which has what they are to hold."""
        host.restore(hashes, block_ids)
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self._enter(block_id, block_hash)

    def _enter(self, block_id: int, block_hash: bytes) -> None:
        self._pool.retain(block_id)
        self._block_by_hash[block_hash] = block_id
        self._hash_by_block[block_id] = block_hash

    def _forget(self, block_ids: Sequence[int]) -> None:
        """The pool evicts these: their content moves to the host tier, or is gone."""
        hashes = [self._hash_by_block.pop(block_id) for block_id in block_ids]
        for block_hash in hashes:
            del self._block_by_hash[block_hash]
        for block_hash in hashes if self._host is None else self._move_out(self._host, hashes, block_ids):
            if block_hash not in self._block_by_hash:
                self._changes.record(block_hash, present=False)

    def _move_out(self, host: HostTier, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Sequence[bytes]:
        """Returns the hashes that the host tier dropped, or did not take."""
        new = {block_hash for block_hash in hashes if block_hash not in host}
        dropped = host.keep(hashes, block_ids)
        for block_hash in new:
            if block_hash in host:
                self._host_changes.record(block_hash, present=True)
        for block_hash in dropped:
            if block_hash not in new:
                self._host_changes.record(block_hash, present=False)
        return dropped
