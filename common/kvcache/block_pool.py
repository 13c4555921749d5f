"""The KV blocks of one worker: who holds how many references, and which blocks may be taken next.

Every block is in exactly one of three places:

    empty ──allocate──► referenced ──last release──► empty                     (content not worth keeping)
                            ▲   └────last release──► reusable (cached, LRU) ──allocate: evicted──► referenced
                            └────────acquire────────────┘

Not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence


class BlockPool:
    """`num_blocks` blocks with ids 0 … num_blocks - 1.

    `on_evict(block_ids)` is called once by each `allocate` that gives cached content up, oldest first, before any of
    the blocks is handed out: so who wants the bytes can still copy them.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[Sequence[int]], None] = _keep_nothing
        self._references = [0] * num_blocks
        self._retained = bytearray(num_blocks)
        self._empty = list(range(num_blocks - 1, -1, -1))
        # Keys in order of last use, oldest first. A dict: ordered, and O(1) at both ends and in the middle.
        self._reusable: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: empty ones, and cached ones that nobody references."""
        return len(self._empty) + len(self._reusable)

    @property
    def num_reusable(self) -> int:
        """Cached blocks that nobody references."""
        return len(self._reusable)

    def allocate(self, n: int) -> list[int] | None:
        """`n` blocks with one reference each, all or none: None if fewer are free. Evicts the least recently used."""
        if n > self.num_free:
            return None
        block_ids, evicted = [], []
        for _ in range(n):
            if self._empty:
                block_id = self._empty.pop()
            else:
                block_id = next(iter(self._reusable))
                del self._reusable[block_id]
                self._retained[block_id] = False
                evicted.append(block_id)
            self._references[block_id] = 1
            block_ids.append(block_id)
        if evicted:
            self.on_evict(evicted)
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these cached or referenced blocks. Raises ValueError for an empty one."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                if not self._retained[block_id]:
                    raise ValueError(f"block {block_id} is empty: there is nothing to share")
                del self._reusable[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less to each. The last block becomes free first, so that prefixes outlive their tails.

        Raises ValueError at the first block, from the end, that has no reference to give up.
        """
        for block_id in reversed(block_ids):
            if self._references[block_id] == 0:
                raise ValueError(f"block {block_id} released more often than taken")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if self._retained[block_id]:
                    self._reusable[block_id] = None
                else:
                    self._empty.append(block_id)

    def retain(self, block_id: int) -> None:
        """Keep this referenced block's content after its last release, until it is evicted."""
        if self._references[block_id] == 0:
            raise ValueError(f"block {block_id} is not referenced: its content is nobody's")
        self._retained[block_id] = True

    def is_retained(self, block_id: int) -> bool:
        return bool(self._retained[block_id])

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def check_integrity(self, expected_references: Mapping[int, int] | None = None) -> None:
        """Recount everything; raises RuntimeError naming the first fault.

        expected_references: block id → references that the owners know of; those left out must have none.
        """
        empty, reusable = set(self._empty), set(self._reusable)
        if len(empty) != len(self._empty):
            raise RuntimeError("a block is twice on the empty list")
        for block_id, count in enumerate(self._references):
            places = (block_id in empty) + (block_id in reusable) + (count > 0)
            if count < 0 or places != 1:
                raise RuntimeError(f"block {block_id} has {count} references and is in {places} places")
            if block_id in reusable and not self._retained[block_id]:
                raise RuntimeError(f"block {block_id} is reusable but holds nothing")
            if block_id in empty and self._retained[block_id]:
                raise RuntimeError(f"block {block_id} is empty but marked as cached")
            if expected_references is not None and count != expected_references.get(block_id, 0):
                raise RuntimeError(
                    f"block {block_id} has {count} references, its owners hold {expected_references.get(block_id, 0)}"
                )


def _keep_nothing(_: Sequence[int]) -> None:
    """What a pool without a cache does on eviction."""
