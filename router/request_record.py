"""What is learned of a request on its way: stamps of its phases, usage, and both legs' timings, of all attempts.

Stamps are monotonic seconds of this router. A worker's durations come with its leg's last frame; they are placed by
the router's own stamps and never compared with a clock of another process.

    received ─ admit ─ submitted ─ queue ─ placing ─ place ─ placed ─ reserve ─ sent ─ … ─ first token ─ … ─ ended
               └──────── once ───────┘      └───────────────────────── each attempt ─────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from common.errors import ERROR_TABLE, BatonError, ErrorKind
from common.rpc.worker_messages import Timings
from common.sampling_params import SamplingParams
from common.tracing import TraceContext
from router.cluster.messages import LegNews
from router.spec import GenerationSpec, Operation, Usage
from router.tenancy.tenant import ANONYMOUS

MAX_MESSAGE_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Failure:
    """An error without its traceback, which would keep alive what the failed code held."""

    kind: ErrorKind
    message: str

    @classmethod
    def of(cls, error: BatonError) -> Failure:
        return cls(error.kind, error.message[:MAX_MESSAGE_CHARS])

    @property
    def is_fault(self) -> bool:
        return ERROR_TABLE[self.kind].is_fault


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that never ran: the gateway turned it away."""

    request_id: str
    trace: TraceContext | None
    operation: Operation
    failure: Failure
    received_at: float
    refused_at: float


@dataclass(frozen=True, slots=True)
class LegEnd:
    """A leg's last frame and when it came."""

    at: float
    timings: Timings


@dataclass(slots=True)
class Attempt:
    """first_index: output tokens that were there before it. prefill_id "": the decode worker computes the prompt.

    sent_at: the prompt was sent to be computed. computed, decoded: the ends of the leg that computed the prompt and of
    the decode leg; None where they are not, or not yet, known. failure: why another attempt followed, or the end;
    blamed_ids: the workers that it is put down to.
    predicted_cached_tokens, num_cached_tokens: of the computing leg, by the prefix index and by itself; None: unknown.
    """

    first_index: int
    placing_at: float | None = None
    placed_at: float | None = None
    sent_at: float | None = None
    first_token_at: float | None = None
    failed_at: float | None = None
    prefill_id: str = ""
    decode_id: str = ""
    transfer_id: str = ""
    predicted_cached_tokens: int | None = None
    num_cached_tokens: int | None = None
    computed: LegEnd | None = None
    decoded: LegEnd | None = None
    failure: Failure | None = None
    blamed_ids: tuple[str, ...] = ()

    @property
    def worker_ids(self) -> list[str]:
        return [worker_id for worker_id in (self.prefill_id, self.decode_id) if worker_id]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended, or a look at one that runs. It holds no token and no text.

    outcome: finish reason, "abort", the kind of the error, or "running". phase: the state that the end came upon.
    prefilled: whether a prefill is known to have been completed, so that cached_tokens means something.
    queue_s: receipt to the sending of the prefill command, and the worker's own queue. e2e_s: receipt to the end.
    """

    request_id: str
    trace: TraceContext | None
    operation: Operation
    sampling: SamplingParams
    outcome: str
    phase: str
    failure: Failure | None
    usage: Usage
    prefilled: bool
    received_at: float
    submitted_at: float
    ended_at: float
    queue_s: float
    timings: Timings
    attempts: Sequence[Attempt]
    tenant: str = ANONYMOUS.name

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.received_at

    @property
    def first_token_at(self) -> float | None:
        """Of the request: the first that any attempt brought."""
        return next((a.first_token_at for a in self.attempts if a.first_token_at is not None), None)


class RequestFacts:
    """Collects. Of several attempts, the first that tells of a phase counts for usage, the last for timings."""

    def __init__(self, spec: GenerationSpec, submitted_at: float) -> None:
        self._spec = spec
        self._submitted_at = submitted_at
        self._attempts: list[Attempt] = []
        self._cached_tokens: int | None = None
        self._dispatched_at: float | None = None
        self._timings = Timings()

    @property
    def knows_cached_tokens(self) -> bool:
        return self._cached_tokens is not None

    @property
    def attempt(self) -> Attempt:
        """The present one."""
        return self._attempts[-1]

    def begin_attempt(self, first_index: int) -> None:
        self._attempts.append(Attempt(first_index))

    def note_dispatch(self, now: float) -> None:
        """The prompt was sent to be computed; for the queue's length only the first time counts."""
        self.attempt.sent_at = now
        if self._dispatched_at is None:
            self._dispatched_at = now

    def note_prefill(self, news: LegNews, now: float) -> None:
        """A frame of the leg that computed the prompt."""
        if self._cached_tokens is None:
            self._cached_tokens = min(news.num_cached_tokens, len(self._spec.prompt_token_ids))
        if news.leg_ended:
            theirs = news.timings
            if theirs.prefill_s:
                self.attempt.num_cached_tokens = news.num_cached_tokens
            self.attempt.computed = LegEnd(now, theirs)
            self._timings = replace(
                self._timings,
                queue_s=theirs.queue_s,
                prefill_s=theirs.prefill_s,
                transfer_s=theirs.transfer_s,
                transfer_bytes=theirs.transfer_bytes,
            )

    def note_decode(self, news: LegNews, now: float) -> None:
        if news.leg_ended:
            self.attempt.decoded = LegEnd(now, news.timings)
            self._timings = replace(self._timings, decode_s=news.timings.decode_s)

    def note_failure(self, error: BatonError, blamed: Iterable[str], now: float) -> None:
        """Of the present attempt. blamed: workers that the next one avoids."""
        attempt = self.attempt
        attempt.failed_at, attempt.failure, attempt.blamed_ids = now, Failure.of(error), tuple(sorted(blamed))

    def usage(self, num_tokens: int) -> Usage:
        if self._spec.choice_index > 0:  # the prompt counts once, with the first choice
            return Usage(0, num_tokens, 0)
        return Usage(len(self._spec.prompt_token_ids), num_tokens, self._cached_tokens or 0)

    def record(self, outcome: str, phase: str, num_tokens: int, now: float, error: BatonError | None) -> RequestRecord:
        spec = self._spec
        dispatched_at = now if self._dispatched_at is None else self._dispatched_at
        return RequestRecord(
            request_id=spec.request_id,
            trace=spec.trace,
            operation=spec.operation,
            sampling=spec.sampling,
            outcome=outcome,
            phase=phase,
            failure=None if error is None else Failure.of(error),
            usage=self.usage(num_tokens),
            prefilled=self._cached_tokens is not None,
            received_at=spec.received_at,
            submitted_at=self._submitted_at,
            ended_at=now,
            queue_s=dispatched_at - spec.received_at + self._timings.queue_s,
            timings=self._timings,
            attempts=self._attempts,
            tenant=spec.tenant.name,
        )
