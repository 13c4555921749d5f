"""A worker's prefix cache as the simulator needs it: which block ids it holds, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loadtest.traces import TraceEntry


class LruCache:
    """capacity: in blocks. Ids of a trace are chained: equal ids mean equal prefixes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, block_ids: Sequence[int]) -> int:
        """Length of the leading run that is held. Touches nothing."""
        for index, block_id in enumerate(block_ids):
            if block_id not in self._blocks:
                return index
        return len(block_ids)

    def use(self, block_ids: Sequence[int]) -> None:
        """All of these are held now, and used. Tails are evicted before what they hang on."""
        for block_id in reversed(block_ids):
            self._blocks.pop(block_id, None)
            self._blocks[block_id] = None
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


def pooled_hit_rate(trace: Sequence[TraceEntry], capacity: int | None, block_tokens: int) -> float:
    """Part of all prompt tokens that one cache of the whole fleet's capacity would have held: no router can do better.

    capacity: in blocks; None: without end.
    """
    cache = LruCache(capacity if capacity is not None else 1 << 62)
    hits = total = 0
    for entry in trace:
        hits += cached_tokens(cache.num_cached(entry.block_ids), entry.input_tokens, block_tokens)
        total += entry.input_tokens
        cache.use(entry.block_ids)
    return hits / total if total else 0.0


def cached_tokens(num_blocks: int, num_tokens: int, block_tokens: int) -> int:
    """Reusable tokens of a prompt: whoever computes it computes its last token, whatever is cached."""
    return min(num_blocks * block_tokens, num_tokens - 1)
