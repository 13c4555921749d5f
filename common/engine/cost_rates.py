"""What this machine's ways to get KV back cost: measured once, rounded so that decisions repeat."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final


@dataclass(frozen=True, slots=True)
class CostRates:
    """Nanoseconds, powers of two. They don't change while an engine lives: the same trace gives the same decisions.

    token_ns: computing one token of a chunk with little context. attention_tokens: context with which a token costs
    twice that. block_copy_ns: one block, one way, between pool and host memory. step_ns: a decode step.
    """

    token_ns: int = 1 << 18
    attention_tokens: int = 1 << 12
    block_copy_ns: int = 1 << 17
    step_ns: int = 1 << 23

    def compute_ns(self, first: int, end: int) -> int:
        """The KV of positions [first, end): a token at position p costs token_ns · (1 + p / attention_tokens)."""
        attention_ns = self.token_ns * (end * end - first * first) // (2 * self.attention_tokens)
        return self.token_ns * (end - first) + attention_ns


# Of a small model on a CPU; for tests, and where nothing was measured.
DEFAULT_RATES: Final = CostRates()


def quantised_ns(seconds: float) -> int:
    """The nearest power of two nanoseconds, at least 1: two measurements of one machine seldom differ by it."""
    return 1 << max(0, round(log2(max(seconds * 1e9, 1.0))))
