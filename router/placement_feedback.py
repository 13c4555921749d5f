"""What ended requests teach placement: how fast KV travels, and whether the prefix index told the truth."""

from __future__ import annotations

from router.cluster.index_audit import IndexAudit
from router.policy.transfer_rate import TransferRate
from router.request_record import RequestRecord


class PlacementFeedback:
    """An EndObserver."""

    def __init__(self, transfers: TransferRate, audit: IndexAudit) -> None:
        self._transfers = transfers
        self._audit = audit

    def on_end(self, record: RequestRecord) -> None:
        for attempt in record.attempts:
            if attempt.computed is not None:
                timings = attempt.computed.timings
                num_tokens = record.usage.prompt_tokens + attempt.first_index
                self._transfers.note(timings.transfer_bytes, timings.transfer_s, num_tokens)
            if attempt.predicted_cached_tokens is not None and attempt.num_cached_tokens is not None:
                worker_id = attempt.prefill_id or attempt.decode_id
                self._audit.note(worker_id, attempt.predicted_cached_tokens, attempt.num_cached_tokens)
