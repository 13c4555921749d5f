"""What this router's own recent placements will have put into caches: a bounded stand-in for the prefix index.

It covers two gaps. Between a decision and the index's knowledge of it lie the prefill and the publishing: until then
the second request of a burst must already follow the first (`pending`). And while the index is away, the last known
decisions are better than none (all of them). Pure: the caller brings the time.

    chain of a prompt:   h0 h1 … h7 h8 … h15 h16 …      only every STRIDE-th hash is kept
                                 ▲        ▲
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from common.kvcache.block_hash import HASH_BYTES

STRIDE: Final = 8
# ≈ 6 MB; at 16-token blocks 2 M tokens of prompts.
MAX_ENTRIES: Final = 16_384
MAX_HOLDERS: Final = 4

# (who, seconds at which the index should know it)
_Holder = tuple[str, float]


class RecentPrefixes:
    """Owned by one router. stride: in blocks; a chain shorter than it leaves nothing."""

    def __init__(self, stride: int = STRIDE, max_entries: int = MAX_ENTRIES) -> None:
        self._stride = stride
        self._max_entries = max_entries
        self._holders: OrderedDict[bytes, tuple[_Holder, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, packed_hashes: bytes, holders: Iterable[str], visible_at: float) -> None:
        """The prompt of this chain was sent to `holders`. visible_at: when the index should know of it."""
        fresh = tuple((holder, visible_at) for holder in holders)
        names = {name for name, _ in fresh}
        for block_hash in self._sampled(packed_hashes):
            known = self._holders.pop(block_hash, ())
            kept = tuple(h for h in known if h[0] not in names)
            self._holders[block_hash] = (fresh + kept)[:MAX_HOLDERS]
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)

    def num_blocks(self, packed_hashes: bytes, *, pending_since: float | None = None) -> dict[str, int]:
        """holder → leading blocks that it was sent. pending_since: only what becomes visible later than this."""
        longest: dict[str, int] = {}
        alive: set[str] | None = None
        num_blocks = 0
        for block_hash in self._sampled(packed_hashes):
            num_blocks += self._stride
            found = self._holders.get(block_hash)
            if found is None:
                break
            # A holder that lacks an earlier part of the chain has evicted it, or was never sent it.
            alive = {name for name, _ in found if alive is None or name in alive}
            if not alive:
                break
            for name, visible_at in found:
                if name in alive and (pending_since is None or visible_at > pending_since):
                    longest[name] = num_blocks
        return longest

    def _sampled(self, packed_hashes: bytes) -> Iterable[bytes]:
        step = self._stride * HASH_BYTES
        for end in range(step, len(packed_hashes) + 1, step):
            yield packed_hashes[end - HASH_BYTES : end]
