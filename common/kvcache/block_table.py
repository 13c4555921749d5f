"""A sequence's blocks in order. Append-only, but for a shared block that must be written to: a copy replaces it.

position   0 … bs-1 | bs … 2bs-1 | 2bs …
block_ids     [0]   |     [1]    |  [2]      slot = block_ids[position // bs] * bs + position % bs
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockTable:
    """Holds ids, not references: who appends a block owns a reference to it, and `clear` gives them all back."""

    __slots__ = ("_block_ids", "_block_size")

    def __init__(self, block_size: int) -> None:
        self._block_ids: list[int] = []
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._block_ids)

    @property
    def block_ids(self) -> Sequence[int]:
        """All blocks, head-room included. A view: don't keep it past the next change."""
        return self._block_ids

    def append(self, block_ids: Sequence[int]) -> None:
        self._block_ids.extend(block_ids)

    def replace(self, index: int, block_id: int) -> int:
        """Puts `block_id` in the place of number `index`; returns what stood there, whose reference is the caller's."""
        old, self._block_ids[index] = self._block_ids[index], block_id
        return old

    def num_missing(self, num_tokens: int) -> int:
        """How many more blocks positions [0, num_tokens) need."""
        return max(0, num_blocks_for_tokens(num_tokens, self._block_size) - len(self._block_ids))

    def covering(self, num_tokens: int) -> Sequence[int]:
        """The blocks of positions [0, num_tokens), which must be there. A view where it is the whole table."""
        n = num_blocks_for_tokens(num_tokens, self._block_size)
        if n > len(self._block_ids):
            raise ValueError(f"{num_tokens} tokens need {n} blocks, the table has {len(self._block_ids)}")
        return self._block_ids if n == len(self._block_ids) else self._block_ids[:n]

    def clear(self) -> list[int]:
        """Empties the table; the caller releases what it returns."""
        block_ids, self._block_ids = self._block_ids, []
        return block_ids


def num_blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
