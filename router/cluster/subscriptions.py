"""Who waits for which transfer_id on one session, and how much load of ours that is. No I/O.

The figures are predictions on route: they count from the moment of the decision, before the worker can report them.
Each share is given back exactly once, whichever exit comes first: answer, removal, or the loss of the session.
"""

from __future__ import annotations

from common.errors import BatonError, ErrorKind
from router.cluster.messages import LegListener


class _Subscription:
    __slots__ = ("blocks", "listener", "prefill_tokens")

    def __init__(self, listener: LegListener, prefill_tokens: int, blocks: int) -> None:
        self.listener = listener
        self.prefill_tokens = prefill_tokens
        self.blocks = blocks


class SubscriptionTable:
    """transfer_id → listener.

    unanswered_prefill_tokens: prompt tokens sent of which no first token came yet. unconfirmed_blocks: blocks asked
    for and not yet granted.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, _Subscription] = {}
        self.unanswered_prefill_tokens = 0
        self.unconfirmed_blocks = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, transfer_id: str, listener: LegListener, *, prefill_tokens: int, blocks: int) -> None:
        if transfer_id in self._by_id:
            raise BatonError(ErrorKind.INTERNAL, f"transfer {transfer_id} is subscribed to already")
        self._by_id[transfer_id] = _Subscription(listener, prefill_tokens, blocks)
        self.unanswered_prefill_tokens += prefill_tokens
        self.unconfirmed_blocks += blocks

    def get(self, transfer_id: str) -> LegListener | None:
        subscription = self._by_id.get(transfer_id)
        return None if subscription is None else subscription.listener

    def answered(self, transfer_id: str) -> LegListener | None:
        """As `get`, for a frame with tokens: its prompt does not wait any more, and its blocks are taken."""
        subscription = self._by_id.get(transfer_id)
        if subscription is None:
            return None
        if subscription.prefill_tokens or subscription.blocks:
            self._settle(subscription)
        return subscription.listener

    def confirmed(self, transfer_id: str) -> LegListener | None:
        """As `get`, for a granted reservation: the worker's reports hold its blocks from now on."""
        subscription = self._by_id.get(transfer_id)
        if subscription is None:
            return None
        self.unconfirmed_blocks -= subscription.blocks
        subscription.blocks = 0
        return subscription.listener

    def remove(self, transfer_id: str) -> None:
        """A no-op where it is gone already."""
        subscription = self._by_id.pop(transfer_id, None)
        if subscription is not None:
            self._settle(subscription)

    def remove_all(self) -> list[tuple[str, LegListener]]:
        """Empty the table and return what was in it."""
        removed = [(transfer_id, subscription.listener) for transfer_id, subscription in self._by_id.items()]
        self._by_id.clear()
        self.unanswered_prefill_tokens = self.unconfirmed_blocks = 0
        return removed

    def _settle(self, subscription: _Subscription) -> None:
        self.unanswered_prefill_tokens -= subscription.prefill_tokens
        self.unconfirmed_blocks -= subscription.blocks
        subscription.prefill_tokens = subscription.blocks = 0
