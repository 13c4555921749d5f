"""What a router and a worker say to each other, without protobuf and without torch: both sides' own types.

protos/baton/worker/v1/worker.proto has the frames; worker_convert.py maps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling_params import SamplingParams
from common.step_rates import StepRates

# Sequences of one request, the first included; more are refused.
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """epoch: one incarnation; a frame that names another epoch is refused."""

    worker_id: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Fork:
    """One more continuation of a prompt, of the same parameters but for its seed (64 bits).

    transfer_id: its own; its frames, its abort and its end go by it.
    """

    transfer_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One attempt of one request, as both legs are told of it.

    transfer_id: ours, never reused. request_id: the client's, for logs only. token_ids: the prompt, then the tokens
    emitted by earlier attempts. hash_seed: 16 bytes, parent of the first block's hash. deadline: monotonic seconds of
    this process; what is left of it travels. traceparent: W3C trace context, "" where there is none. forks: further
    continuations of token_ids, which share the first one's transfer and blocks. priority: class; lower is more urgent.
    """

    transfer_id: str
    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    hash_seed: bytes
    sampling: SamplingParams
    deadline: float
    traceparent: str = ""
    forks: tuple[Fork, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """Where a reservation waits; the router only passes it from decode to prefill. address: host:port.

    secret: 16 random bytes, the proof that the bearer was given this reservation. num_cached_tokens: leading ones that
    need not be sent. pull_secret: for asking that worker for them (PullSource); empty: it lends nothing.
    """

    address: str
    worker: WorkerIdentity
    secret: bytes
    num_cached_tokens: int
    pull_secret: bytes = b""


@dataclass(frozen=True, slots=True)
class PullSource:
    """A worker that may be asked for a prefix. address: host:port of its TransferService. secret: that worker's own.
    num_tokens: leading ones that it is thought to hold."""

    address: str
    worker: WorkerIdentity
    secret: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one leg, monotonic differences of its process; 0 where a part did not happen.

    queue_s: arrival to first step (or grant of the reservation). prefill_s: first step to first token.
    transfer_s: first block sent to commit. overlap_s: its part that lay before the first token; known to the sender,
    and not told to routers. decode_s: first decode step to the end.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    overlap_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """State of a worker after a step, all routers' requests together. num_free_blocks: includes cached ones that nobody
    references.

    queued_prefill_tokens: accepted and still to be computed here. Totals count from the engine's start, in tokens for
    the prefix cache. step_rates: None until learned. The rest is the worker's own and not told to routers. Of the
    hits, the host tier brought prefix_host_hits_total. num_host_blocks: the host tier's slots, 0 where there is none;
    saves and loads are blocks copied out of and into the pool. Of the preemptions, num_swapped_total left KV to host
    memory, num_offered_total were offered to other workers. chunk_budget_tokens: of the next step. engine_beats grows
    while the engine's loop is alive. engine_stalled: it is silent for longer than a step can take. draining: no new
    sequences are taken.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_blocks: int = 0
    queued_prefill_tokens: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    step_rates: StepRates | None = None
    prefix_host_hits_total: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_host_saves_total: int = 0
    num_host_loads_total: int = 0
    num_preemptions_total: int = 0
    num_swapped_total: int = 0
    num_offered_total: int = 0
    chunk_budget_tokens: int = 0
    num_dropped_events_total: int = 0
    engine_beats: int = 0
    engine_stalled: bool = False
    draining: bool = False
