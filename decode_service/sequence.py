"""A sequence on the decode worker."""

from __future__ import annotations

from common.engine.sequence import Sequence
from common.rpc.worker_messages import SequenceSpec
from decode_service.preemption import MAX_PREEMPTIONS


class DecodeSequence(Sequence):
    """prefill_here: set once, right after acceptance; its KV is computed by this worker, so no transfer exists.

    num_preemptions: how often it gave its blocks up. pinned_hashes: content that host memory keeps for it meanwhile.
    """

    __slots__ = ("num_preemptions", "pinned_hashes", "prefill_here")

    prefill_here: bool

    def __init__(self, spec: SequenceSpec, owner: int, arrival: int, arrived_at: float, block_size: int) -> None:
        super().__init__(spec, owner, arrival, arrived_at, block_size)
        self.num_preemptions = 0
        self.pinned_hashes: list[bytes] = []

    @property
    def is_guaranteed(self) -> bool:
        """It gave way so often that it does no more: with its next blocks it gets all that it can need."""
        return self.num_preemptions >= MAX_PREEMPTIONS
