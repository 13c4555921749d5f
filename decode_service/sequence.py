"""A sequence on the decode worker."""

from __future__ import annotations

from common.engine.sequence import Sequence


class DecodeSequence(Sequence):
    """prefill_here: set once, right after acceptance; its KV is computed by this worker, so no transfer exists."""

    __slots__ = ("prefill_here",)

    prefill_here: bool
