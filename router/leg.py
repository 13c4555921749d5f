"""One side of one attempt: a request's listener on the session of its prefill or decode worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.errors import BatonError
from common.logprobs import TokenLogprobs
from common.registry import Role
from common.rpc.worker_messages import TransferTarget
from router.cluster.messages import LegNews
from router.cluster.worker_session import WorkerSession


class LegOwner(Protocol):
    """The request; hears nothing of a leg that was closed or has ended."""

    def on_reserved(self, target: TransferTarget) -> None: ...

    def on_tokens(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None: ...

    def on_prompt_logprobs(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None: ...

    def on_news(self, leg: Leg, news: LegNews) -> None: ...

    def on_lost(self, leg: Leg, error: BatonError) -> None: ...


class Leg:
    """open: the worker may still send frames, and may still hold something of ours."""

    __slots__ = ("_owner", "open", "role", "session", "transfer_id")

    def __init__(self, owner: LegOwner, role: Role, session: WorkerSession, transfer_id: str) -> None:
        self.role = role
        self.session = session
        self.transfer_id = transfer_id
        self.open = True
        self._owner = owner

    @property
    def worker_id(self) -> str:
        return self.session.record.worker_id

    def subscribe(self, *, prefill_tokens: int, blocks: int) -> None:
        """Raises LEASE_LOST where the session is not ready."""
        self.session.subscribe(self.transfer_id, self, prefill_tokens=prefill_tokens, blocks=blocks)

    def close(self, *, abort: bool) -> None:
        """Hear no more of it; a no-op where it is over. abort: tell the worker to drop what it still has."""
        if self.open:
            self.open = False
            if abort:
                self.session.send_abort(self.transfer_id)
            self.session.unsubscribe(self.transfer_id)

    def on_reserved(self, target: TransferTarget) -> None:
        if self.open:
            self._owner.on_reserved(target)

    def on_tokens(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        if self.open:
            self._owner.on_tokens(first_index, token_ids, logprobs)

    def on_prompt_logprobs(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        if self.open:
            self._owner.on_prompt_logprobs(first_index, logprobs)

    def on_news(self, news: LegNews) -> None:
        if self.open:
            self.open = not news.leg_ended
            self._owner.on_news(self, news)

    def on_lost(self, error: BatonError) -> None:
        if self.open:
            self.open = False
            self._owner.on_lost(self, error)
