"""A sequence on the prefill worker: what it is to become, and the transfer that carries it away."""

from __future__ import annotations

from common.engine.sequence import Sequence, SequenceStatus
from common.errors import BatonError
from common.rpc.worker_messages import PullSource, SequenceSpec
from kv_transfer.types import OutgoingTransfer, TransferTarget


class PrefillSequence(Sequence):
    """target: set once, right after acceptance. outgoing: from admission to its end.

    num_pushed_blocks: leading blocks that were handed to the transfer, or that the decode side holds already.
    pull_sources: whom to ask for a prefix; pull_started_at: when one was asked, monotonic seconds.
    given_up: the leg will end without success, for `error` or, where that is None, because the router aborted it.
    """

    __slots__ = (
        "error",
        "given_up",
        "num_pushed_blocks",
        "outgoing",
        "pull_sources",
        "pull_started_at",
        "target",
    )

    target: TransferTarget

    def __init__(self, spec: SequenceSpec, owner: int, arrival: int, arrived_at: float, block_size: int) -> None:
        super().__init__(spec, owner, arrival, arrived_at, block_size)
        self.outgoing: OutgoingTransfer | None = None
        self.num_pushed_blocks = 0
        self.pull_sources: tuple[PullSource, ...] = ()
        self.pull_started_at = 0.0
        self.given_up = False
        self.error: BatonError | None = None

    @property
    def is_pulling(self) -> bool:
        """A prefix is on its way from another worker, into blocks of this sequence."""
        return self.status == SequenceStatus.RECEIVING
