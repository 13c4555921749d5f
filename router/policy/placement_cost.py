"""What a placement costs, in seconds: the time until the request's stream flows, and the harm to streams that run.

Pure. docs/PLACEMENT.md derives the formula; here it is as computed, for a prompt of `n` tokens:

    missing(w)    n − cached on the device − HOST_WEIGHT-discounted tokens of the host tier; for p also − what a pull
                  from another worker spares, where common/transfer_cost.py says that it pays
    work(w)       base(w) · steps + prefill_token_s(w) · (queued(w) + missing(w))
    grant(d)      half a step of d, if streams run there: a reservation is answered between steps
    room(d)       time until d has blocks for what it lacks, and the risk of preemption near the end of its pool
    load(d)       STREAM_STEPS · what one stream more adds to its own and to the running streams' steps
    transfer(d)   KV bytes that d lacks / rate; only what outlasts the prefill's computing delays anybody

    disaggregated(p, d) = grant(d) + work(p) + max(0, transfer(d) − computing(p)) + room(d) + load(d)
    local(d)            = grant(d) + work(d)                                      + room(d) + load(d) + harm(d)
    harm(d)             = running(d) · prefill_token_s(d) · missing(d)       every stream waits while d computes
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from common.step_rates import StepRates
from common.transfer_cost import TransferCost, is_worth_moving

# Bringing a token back from the host tier, as a part of computing it.
HOST_WEIGHT: Final = 0.1
# Steps that a stream is expected to stay for, as far as it should sway a placement.
STREAM_STEPS: Final = 32.0
# Computing again what another worker holds takes capacity from later requests, and room in a cache, besides the time.
CAPACITY_WEIGHT: Final = 4.0
# Waiting for somebody else's blocks takes longer than computing one's own tokens.
SHORTAGE_WEIGHT: Final = 4.0
# Below this part of free blocks a pool is near the point where running sequences are preempted.
HEAD_ROOM: Final = 0.05
# Prompt tokens that share one step's fixed cost.
TOKENS_A_STEP: Final = 2048
# Until anybody has reported. Only differences between workers matter then, and there are none.
DEFAULT_RATES: Final = StepRates(base_s=5e-3, prefill_token_s=1e-4, decode_token_s=1e-4)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the router knows of one worker at one moment.

    usable: connected and not draining. num_running: running and waiting sequences. num_free_blocks: free to take,
    cached-but-unreferenced ones included. num_cached_tokens: leading tokens of this request's prompt on the device;
    num_host_cached_tokens: those that follow them in the host tier. rates: None until it has reported any.
    """

    worker_id: str
    usable: bool
    num_blocks: int
    num_free_blocks: int
    num_running: int
    queued_prefill_tokens: int
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    rates: StepRates | None = None


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """num_tokens: prompt and already emitted tokens. failed: ids of workers on which this request failed before.

    token_transfer_s: seconds to move one token's KV; 0: not known. pullable_tokens: longest prefix that some worker
    would send to the prefill worker. local_prefill_max_tokens: the decode worker computes at most so
    many tokens itself while a prefill worker is usable; 0: none. shared_cores: prefill workers compute on the cores of
    the decode workers, so that whatever they compute delays streams and prompts of both.
    """

    num_tokens: int
    block_size: int
    failed: Collection[str] = ()
    token_transfer_s: float = 0.0
    pullable_tokens: int = 0
    local_prefill_max_tokens: int = 0
    shared_cores: bool = False


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """work_s: until the first token. computing_s: its part that is this request's own. capacity_s: what that computing
    costs the requests that come after it.
    """

    work_s: float
    computing_s: float
    capacity_s: float


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """ttft_s: what the decode worker adds to the first token's time. transfer_s: until its missing KV has come.

    other_s: load and room. local: None where it must not compute the prompt itself.
    """

    ttft_s: float
    transfer_s: float
    other_s: float
    local: LocalCost | None


@dataclass(frozen=True, slots=True)
class LocalCost:
    """Of the prompt's computing by the decode worker."""

    work_s: float
    harm_s: float
    capacity_s: float


def prefill_cost(request: PlacementRequest, worker: WorkerLoad, rates: StepRates) -> PrefillCost:
    """Seconds. rates: the worker's, or what stands for them."""
    missing = _missing_tokens(request, worker) - _tokens_spared_by_pull(request, worker, rates)
    computing_s = rates.prefill_token_s * missing
    work_s = _work_s(worker.queued_prefill_tokens + missing, rates)
    return PrefillCost(work_s, computing_s, CAPACITY_WEIGHT * computing_s)


def decode_cost(request: PlacementRequest, worker: WorkerLoad, rates: StepRates, *, only: bool) -> DecodeCost:
    """Seconds. only: there is no prefill worker, so that this one computes the prompt, however long."""
    running, missing = worker.num_running, _missing_tokens(request, worker)
    step_s = rates.step_s(0, running)
    local = None
    if only or missing <= request.local_prefill_max_tokens:
        computing_s = rates.prefill_token_s * missing
        local = LocalCost(
            work_s=_work_s(worker.queued_prefill_tokens + missing, rates),
            harm_s=running * computing_s,
            capacity_s=CAPACITY_WEIGHT * computing_s,
        )
    # One's own steps get longer by the streams that run, theirs by this one.
    load_s = STREAM_STEPS * 2 * rates.decode_token_s * running
    return DecodeCost(
        ttft_s=step_s / 2 if running else 0.0,
        transfer_s=missing * request.token_transfer_s,
        other_s=load_s + _room_s(request, worker, rates),
        local=local,
    )


def fits(request: PlacementRequest, worker: WorkerLoad) -> bool:
    """Whether the worker's whole pool could hold the prompt and one more token."""
    return request.num_tokens < worker.num_blocks * request.block_size


def _missing_tokens(request: PlacementRequest, worker: WorkerLoad) -> float:
    """Never 0: whoever computes a prompt computes its last token, for its logits."""
    uncached = max(1, request.num_tokens - worker.num_cached_tokens)
    on_host = min(worker.num_host_cached_tokens, uncached - 1)
    return uncached - (1 - HOST_WEIGHT) * on_host


def _tokens_spared_by_pull(request: PlacementRequest, worker: WorkerLoad, rates: StepRates) -> float:
    """What the worker need not compute since another sends it, less the wait for that; in tokens of computing."""
    held = worker.num_cached_tokens + worker.num_host_cached_tokens
    num_tokens = min(request.pullable_tokens, request.num_tokens - 1) - held
    if num_tokens <= 0 or not request.token_transfer_s:
        return 0.0
    cost = TransferCost(bytes_per_s=1 / request.token_transfer_s)
    if not is_worth_moving(num_tokens, 1, rates.prefill_token_s, cost):
        return 0.0
    return num_tokens - cost.seconds(num_tokens) / rates.prefill_token_s


def _work_s(num_tokens: float, rates: StepRates) -> float:
    return rates.base_s * max(1.0, num_tokens / TOKENS_A_STEP) + rates.prefill_token_s * num_tokens


def _room_s(request: PlacementRequest, worker: WorkerLoad, rates: StepRates) -> float:
    """Blocks that are missing must be given back by others; a pool that is nearly full preempts, and computes again."""
    new_tokens = max(0, request.num_tokens - worker.num_cached_tokens)
    free_tokens = worker.num_free_blocks * request.block_size
    shortage_s = SHORTAGE_WEIGHT * rates.prefill_token_s * max(0, new_tokens - free_tokens)
    pool_tokens = max(1, worker.num_blocks * request.block_size)
    left = max(0.0, (free_tokens - new_tokens) / pool_tokens)
    risk = max(0.0, 1 - left / HEAD_ROOM)
    return shortage_s + risk * rates.prefill_token_s * request.num_tokens
