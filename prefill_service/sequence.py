"""A sequence on the prefill worker: what it is to become, and the transfer that carries it away."""

from __future__ import annotations

from common.engine.sequence import Sequence
from common.errors import BatonError
from common.rpc.worker_messages import SequenceSpec
from kv_transfer.types import OutgoingTransfer, TransferTarget


class PrefillSequence(Sequence):
    """target: set once, right after acceptance. outgoing: from admission to its end.

    num_pushed_blocks: leading blocks that were handed to the transfer, or that the decode side holds already.
    given_up: the leg will end without success, for `error` or, where that is None, because the router aborted it.
    """

    __slots__ = ("error", "given_up", "num_pushed_blocks", "outgoing", "target")

    target: TransferTarget

    def __init__(self, spec: SequenceSpec, owner: int, arrival: int, arrived_at: float, block_size: int) -> None:
        super().__init__(spec, owner, arrival, arrived_at, block_size)
        self.outgoing: OutgoingTransfer | None = None
        self.num_pushed_blocks = 0
        self.given_up = False
        self.error: BatonError | None = None
