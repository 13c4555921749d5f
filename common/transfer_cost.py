"""What moving KV costs against computing it: the one model by which placement weighs both and a prefill worker decides
on a pull. Pure; seconds.

    move(n tokens)    = latency_s + n · token_bytes / bytes_per_s
    compute(n tokens) = n · prefill_token_s

A pull is worth it where MARGIN · move < compute: a wrong "no" costs nothing more than today, a wrong "yes" the wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MARGIN: Final = 2.0
# Before anything was measured: one round trip and a slow network card's stream.
PRIOR_LATENCY_S: Final = 0.01
PRIOR_BYTES_PER_S: Final = 1e9
# Weight of a new observation; a pull or a step is a noisy witness.
_ALPHA: Final = 0.2
# Smaller steps say more about what a step costs at least than about a token.
_MIN_STEP_TOKENS: Final = 16
_MIN_PULL_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Of one path between two workers. latency_s: asking, connecting, handshake."""

    latency_s: float = PRIOR_LATENCY_S
    bytes_per_s: float = PRIOR_BYTES_PER_S

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def is_worth_moving(num_tokens: int, token_bytes: int, prefill_token_s: float, cost: TransferCost) -> bool:
    """Whether fetching the KV of so many tokens is expected to be clearly cheaper than computing it."""
    return num_tokens > 0 and MARGIN * cost.seconds(num_tokens * token_bytes) < num_tokens * prefill_token_s


class CostEstimator:
    """What one prefill worker has seen of both. For one thread."""

    def __init__(self) -> None:
        self._prefill_token_s: float | None = None
        self._cost = TransferCost()

    @property
    def prefill_token_s(self) -> float | None:
        """None before the first step of some size."""
        return self._prefill_token_s

    @property
    def cost(self) -> TransferCost:
        return self._cost

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step has computed so many prompt tokens."""
        if num_tokens >= _MIN_STEP_TOKENS and seconds > 0:
            observed = seconds / num_tokens
            known = self._prefill_token_s
            self._prefill_token_s = observed if known is None else known + _ALPHA * (observed - known)

    def note_pull(self, num_bytes: int, seconds: float) -> None:
        """A pull of so many bytes took so long, from the first question to the commit."""
        cost = self._cost
        if num_bytes >= _MIN_PULL_BYTES and seconds > cost.latency_s:
            observed = num_bytes / (seconds - cost.latency_s)
            self._cost = TransferCost(cost.latency_s, cost.bytes_per_s + _ALPHA * (observed - cost.bytes_per_s))
        else:
            self._cost = TransferCost(cost.latency_s + _ALPHA * (seconds - cost.latency_s), cost.bytes_per_s)

    def is_worth_pulling(self, num_tokens: int, token_bytes: int) -> bool:
        known = self._prefill_token_s
        return known is not None and is_worth_moving(num_tokens, token_bytes, known, self._cost)

    def patience_s(self, num_tokens: int) -> float:
        """As long as computing would take: a pull that needs longer has lost already."""
        return num_tokens * (self._prefill_token_s or 0.0)
