"""What is learned of a request on its way: usage and timings, from both legs and all attempts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.cluster.messages import LegNews, Timings
from router.spec import GenerationSpec, Usage


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended. outcome: finish reason, "abort", or the kind of the error.

    prefilled: whether a prefill is known to have been completed, so that cached_tokens means something.
    queue_s: receipt to the sending of the prefill command, and the worker's own queue. e2e_s: receipt to the end.
    """

    outcome: str
    usage: Usage
    prefilled: bool
    queue_s: float
    e2e_s: float
    timings: Timings


class RequestFacts:
    """Collects. Of several attempts, the first that tells of a phase counts for usage, the last for timings."""

    def __init__(self, spec: GenerationSpec) -> None:
        self._spec = spec
        self._cached_tokens: int | None = None
        self._dispatched_at: float | None = None
        self._timings = Timings()

    @property
    def knows_cached_tokens(self) -> bool:
        return self._cached_tokens is not None

    def note_dispatch(self, now: float) -> None:
        """The prompt was sent to be computed; only the first time counts."""
        if self._dispatched_at is None:
            self._dispatched_at = now

    def note_prefill(self, news: LegNews) -> None:
        """A frame of the leg that computed the prompt."""
        if self._cached_tokens is None:
            self._cached_tokens = min(news.num_cached_tokens, len(self._spec.prompt_token_ids))
        if news.leg_ended:
            theirs = news.timings
            self._timings = replace(
                self._timings,
                queue_s=theirs.queue_s,
                prefill_s=theirs.prefill_s,
                transfer_s=theirs.transfer_s,
                transfer_bytes=theirs.transfer_bytes,
            )

    def note_decode(self, news: LegNews) -> None:
        if news.leg_ended:
            self._timings = replace(self._timings, decode_s=news.timings.decode_s)

    def usage(self, num_tokens: int) -> Usage:
        return Usage(len(self._spec.prompt_token_ids), num_tokens, self._cached_tokens or 0)

    def record(self, outcome: str, num_tokens: int, now: float) -> RequestRecord:
        dispatched_at = now if self._dispatched_at is None else self._dispatched_at
        return RequestRecord(
            outcome=outcome,
            usage=self.usage(num_tokens),
            prefilled=self._cached_tokens is not None,
            queue_s=dispatched_at - self._spec.received_at + self._timings.queue_s,
            e2e_s=now - self._spec.received_at,
            timings=self._timings,
        )
