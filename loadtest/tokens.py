"""Deterministic token ids: the same key gives the same tokens, on every machine and numpy version.

Token i of a span is a hash of (seed, key, i), so equal keys give equal prefixes whatever the lengths, and a 32k-token
prompt is one vectorised expression rather than a random stream that has to be replayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import BenchError

TokenIds: TypeAlias = NDArray[np.uint32]
EMPTY: Final[TokenIds] = np.zeros(0, dtype=np.uint32)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose output passes randomness tests."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TokenSource:
    """Token ids in [low, high): low keeps clear of the special ids that most vocabularies put first."""

    def __init__(self, seed: int, *, low: int = 100, high: int = 32_000) -> None:
        if not 0 <= low < high:
            raise BenchError(f"token ids: [{low}, {high}) is empty; raise --vocab-size")
        self.seed = seed
        self.low = low
        self.high = high

    def key(self, *parts: str | int) -> int:
        """64 bits that name a span, e.g. key("document", 3)."""
        text = "/".join(str(p) for p in (self.seed, *parts))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def child(self, name: str) -> TokenSource:
        """A source whose tokens have nothing in common with this one's."""
        return TokenSource(self.key("child", name), low=self.low, high=self.high)

    def span(self, key: int, length: int) -> TokenIds:
        """uint32 [length]. A longer span with the same key starts with the shorter one."""
        counter = (np.arange(1, length + 1, dtype=np.uint64)) * _GOLDEN + np.uint64(key)
        return self._fold(counter)

    def blocks(self, block_ids: Sequence[int], block_tokens: int, length: int) -> TokenIds:
        """uint32 [length]: block i of the prompt is made from block_ids[i] alone; the last may be cut short.

        Tokens past the last id (ids missing) are left out: the result has at most len(block_ids) * block_tokens.
        """
        base = np.uint64(self.key("block"))
        keys = _splitmix64(np.asarray(block_ids, dtype=np.uint64) * _GOLDEN + base)
        steps = np.arange(1, block_tokens + 1, dtype=np.uint64) * _GOLDEN
        return self._fold((keys[:, None] + steps[None, :]).reshape(-1)[:length])

    def _fold(self, counter: NDArray[np.uint64]) -> TokenIds:
        span = np.uint64(self.high - self.low)
        return (_splitmix64(counter) % span + np.uint64(self.low)).astype(np.uint32)
