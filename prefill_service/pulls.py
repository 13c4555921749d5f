"""When a prefill worker fetches a prefix from another worker instead of computing it, and from which.

    cached here     pulled               computed
    ├───────────────┼────────────────────┼──────────────┤ num_tokens
    0        num_computed_tokens     what the source holds, short of the last token

The first source in the router's order that is expected to be clearly cheaper than computing is asked; the pull gets as
much time as computing would take, then it is given up and the tokens are computed.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Final, Protocol

from common.engine.messages import TransferCommitted, TransferFailed
from common.engine.scheduler import Post
from common.errors import BatonError
from common.rpc.worker_messages import PullSource
from common.transfer_cost import CostEstimator
from kv_transfer.types import Handoff, ReceiverCallbacks, TransferStats
from prefill_service.sequence import PrefillSequence

MIN_PATIENCE_S: Final = 0.05


class PrefixPuller(Protocol):
    """kv_transfer's Puller, as far as a scheduler sees it. Thread-safe; returns at once."""

    def pull(
        self,
        transfer_id: str,
        source: PullSource,
        block_hashes: ListOf[bytes],
        block_ids: ListOf[int],
        num_held_tokens: int,
        callbacks: ReceiverCallbacks,
        timeout_s: float,
    ) -> None:
        """Fetch blocks; the callbacks tell the end. Raises BatonError."""
        ...

    def release(self, transfer_id: str) -> None:
        """Expect it no more. When this returns, nothing writes to its blocks."""
        ...


class Pulls:
    """token_bytes: of one token's KV over all layers. post: hands the end of a pull to the engine's inbox."""

    def __init__(
        self, puller: PrefixPuller, costs: CostEstimator, block_size: int, token_bytes: int, post: Post
    ) -> None:
        self.costs: Final = costs
        self._puller = puller
        self._block_size = block_size
        self._token_bytes = token_bytes
        self._post = post

    def begin(self, sequence: PrefillSequence, now: float) -> bool:
        """Start a pull into the sequence's blocks if one pays. True: its end will be posted."""
        first = sequence.num_registered_blocks
        for source in sequence.pull_sources:
            end = min(source.num_tokens, sequence.num_tokens - 1) // self._block_size
            num_tokens = (end - first) * self._block_size
            if not self.costs.is_worth_pulling(num_tokens, self._token_bytes):
                continue
            timeout_s = min(max(MIN_PATIENCE_S, self.costs.patience_s(num_tokens)), sequence.deadline - now)
            try:
                self._puller.pull(
                    pull_id(sequence),
                    source,
                    sequence.block_hashes[first:end],
                    sequence.block_table.block_ids[first:end],
                    first * self._block_size,
                    self._callbacks(sequence),
                    timeout_s,
                )
            except BatonError:
                return False
            sequence.pull_started_at = now
            return True
        return False

    def release(self, sequence: PrefillSequence) -> None:
        """Nothing writes into the sequence's blocks from now on."""
        self._puller.release(pull_id(sequence))

    def note_done(self, sequence: PrefillSequence, stats: TransferStats, now: float) -> None:
        self.costs.note_pull(stats.num_bytes, now - sequence.pull_started_at)

    def _callbacks(self, sequence: PrefillSequence) -> ReceiverCallbacks:
        transfer_id, arrival, post = sequence.transfer_id, sequence.arrival, self._post

        def on_commit(handoff: Handoff, stats: TransferStats) -> None:
            post(TransferCommitted(transfer_id, arrival, handoff, stats))

        def on_fail(error: BatonError) -> None:
            post(TransferFailed(transfer_id, arrival, error))

        return ReceiverCallbacks(on_commit, on_fail)


def pull_id(sequence: PrefillSequence) -> str:
    """Another id than that of the transfer which the same sequence feeds: both may meet at one worker."""
    return f"{sequence.transfer_id}~pull"
