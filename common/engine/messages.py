"""What goes into an engine and what comes out of it, free of protobuf: a session converts, a scheduler decides.

session ── Command ──► engine inbox ──► scheduler ──► EngineNews ──► session, metrics, registry publisher
KV transfer ── TransferEvent ──┘                      (one a step)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from common.errors import BatonError
from common.kvcache.prefix_cache import CacheChanges
from common.logprobs import TokenLogprobs
from common.rpc.worker_messages import LoadReport, PullSource, SequenceSpec, Timings, TransferTarget
from common.sampling_params import FinishReason
from kv_transfer.types import Handoff, TransferStats


@dataclass(frozen=True, slots=True)
class ReserveCommand:
    """To a decode engine. owner: the session that asks, and that gets all news. prefill_here: compute the KV, too."""

    owner: int
    spec: SequenceSpec
    prefill_here: bool


@dataclass(frozen=True, slots=True)
class PrefillCommand:
    """To a prefill engine: compute, send the KV to `target`, answer the first token.

    pull_sources: who may hold a longer prefix than this worker, most promising first."""

    owner: int
    spec: SequenceSpec
    target: TransferTarget
    pull_sources: tuple[PullSource, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortCommand:
    """Dropped where `owner` has no such sequence: it may have ended at the same moment."""

    owner: int
    transfer_id: str


@dataclass(frozen=True, slots=True)
class AbortOwnerCommand:
    """The session is gone: abort all that came by it, and send it nothing more."""

    owner: int


@dataclass(frozen=True, slots=True)
class DrainCommand:
    """Refuse new sequences from now on; those accepted go on."""


@dataclass(frozen=True, slots=True)
class HandBackCommand:
    """End all sequences that can go on elsewhere, with DRAINING: their routers see to it. What is being sent to other
    workers goes on."""


class MemoryPressure(Enum):
    """OPEN: there is enough. CLOSED: no new sequences. SHED: those that run give way, too."""

    OPEN = "open"
    CLOSED = "closed"
    SHED = "shed"


@dataclass(frozen=True, slots=True)
class MemoryCommand:
    """How short memory is. Each SHED halves what may run at once; OPEN lifts the bound."""

    pressure: MemoryPressure


@dataclass(frozen=True, slots=True)
class TransferCommitted:
    """Receiver: the KV of `transfer_id` is verified and in place. arrival: tells incarnations of an id apart."""

    transfer_id: str
    arrival: int
    handoff: Handoff
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Receiver: the KV of `transfer_id` will not come."""

    transfer_id: str
    arrival: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """Sender: nothing reads the blocks of `transfer_id` any more."""

    transfer_id: str
    arrival: int
    result: TransferStats | BatonError


@dataclass(frozen=True, slots=True)
class LendCommand:
    """Another worker asks for cached blocks, to be sent to `target`. answer: called once, thread-safe, with the number
    of leading blocks that are on their way, or why none is. deadline: monotonic seconds, for the whole transfer."""

    transfer_id: str
    block_hashes: tuple[bytes, ...]
    target: TransferTarget
    deadline: float
    answer: Callable[[int | BatonError], None]


@dataclass(frozen=True, slots=True)
class LoanEnded:
    """Nothing reads the blocks of that loan any more."""

    transfer_id: str


Command = (
    ReserveCommand
    | PrefillCommand
    | AbortCommand
    | AbortOwnerCommand
    | DrainCommand
    | HandBackCommand
    | LendCommand
    | MemoryCommand
)
TransferEvent = TransferCommitted | TransferFailed | TransferEnded | LoanEnded


@dataclass(frozen=True, slots=True)
class LegOutput:
    """News of one sequence. leg_ended: the last of this leg, whatever the cause; its blocks are released.

    first_index: index in the whole output of the first of token_ids. num_cached_tokens: in a prefill leg's first token
    and in every leg's last. timings: in the last only. logprobs: one for each of token_ids, where they were asked for.
    prompt_logprobs: of the prompt's tokens from first_prompt_index on. num_wanted_blocks: not 0 where the sequence was
    preempted and would go on sooner on another worker with so many free blocks; if nobody moves it, it goes on here.
    """

    transfer_id: str
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: BatonError | None = None
    num_cached_tokens: int = 0
    timings: Timings | None = None
    leg_ended: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    first_prompt_index: int = 0
    num_wanted_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EndedLeg:
    """For logs and traces, where a leg failed or is traced. Stamps are monotonic seconds of this process.

    phase: where it ended. transferred_at: commit, at either end. chunks: (end, tokens computed by then) of each chunk
    of a traced prompt. error None and aborted: its router gave it up.
    """

    request_id: str
    transfer_id: str
    traceparent: str
    phase: str
    error: BatonError | None
    aborted: bool
    num_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    arrived_at: float
    ended_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    decode_started_at: float | None = None
    transferred_at: float | None = None
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    chunks: tuple[tuple[float, int], ...] = ()

    @classmethod
    def refused(cls, spec: SequenceSpec, error: BatonError, now: float) -> EndedLeg:
        """It never became a sequence."""
        return cls(
            request_id=spec.request_id,
            transfer_id=spec.transfer_id,
            traceparent=spec.traceparent,
            phase="refused",
            error=error,
            aborted=False,
            num_tokens=len(spec.token_ids),
            num_output_tokens=len(spec.token_ids) - spec.num_prompt_tokens,
            num_cached_tokens=0,
            arrived_at=now,
            ended_at=now,
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """A decode engine's answer to a ReserveCommand: blocks are set aside, the KV may come."""

    transfer_id: str
    target: TransferTarget


@dataclass(slots=True)
class OwnerNews:
    """What one session must hear."""

    reservations: list[Reservation] = field(default_factory=list)
    outputs: list[LegOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computed. num_prefill_tokens: of chunks, recomputed ones included. num_decode_tokens: of sequences
    that have had a first token, one each.
    """

    num_sequences: int
    num_prefill_tokens: int
    num_decode_tokens: int


@dataclass(frozen=True, slots=True)
class EngineNews:
    """All that one round of the engine's loop brought about. step_s, step_shape: None where no step ran.

    ended_legs: those that failed or are traced, and no others.
    """

    by_owner: dict[int, OwnerNews]
    load: LoadReport
    cache_changes: CacheChanges | None
    step_s: float | None
    ended_legs: tuple[EndedLeg, ...] = ()
    step_shape: StepShape | None = None
