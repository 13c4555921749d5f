"""How long a token's KV travels, learned from the transfers that were. Pure."""

from __future__ import annotations

from typing import Final

# A rate that is not seen again counts for so much less with each transfer.
_FADING: Final = 0.99
# Shorter transfers measure their fixed costs.
MIN_BYTES: Final = 64 << 10


class TransferRate:
    """Bytes a second: a fading maximum, since a transfer's seconds hold also its waiting for what is still computed.

    Bytes a token: the largest quotient seen; what the receiver held already was not sent.
    """

    def __init__(self) -> None:
        self._bytes_per_s = 0.0
        self._bytes_per_token = 0.0

    @property
    def token_transfer_s(self) -> float:
        """Seconds; 0 until a transfer was seen."""
        return self._bytes_per_token / self._bytes_per_s if self._bytes_per_s else 0.0

    def note(self, num_bytes: int, seconds: float, num_tokens: int) -> None:
        """One transfer. num_tokens: of the whole sequence."""
        if num_bytes < MIN_BYTES or seconds <= 0 or num_tokens <= 0:
            return
        self._bytes_per_s = max(self._bytes_per_s * _FADING, num_bytes / seconds)
        self._bytes_per_token = max(self._bytes_per_token, num_bytes / num_tokens)
