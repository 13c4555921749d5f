"""Which prefill and which decode worker a request goes to. Pure: the caller brings the snapshot and the randomness.

Both roles are scored in one unit, "tokens of prefill work until this request may start", lowest first:

    prefill_cost(w) = queued(w) + uncached(w)
    decode_cost(w)  = RUNNING_TOKENS · running(w) + TRANSFER_WEIGHT · uncached(w) + SHORTAGE_WEIGHT · shortage(w)

    queued(w)    prompt tokens that w has accepted and not computed: the larger of its own report and of what this
                 router has sent and seen no first token of (a report lags behind decisions of the last milliseconds)
    uncached(w)  tokens of this prompt that w does not hold; for decode they travel instead of being computed
    running(w)   sequences that w runs or lets wait, again the larger of report and own account
    shortage(w)  tokens of this prompt for which w has no free block at the moment

So the longest cached prefix wins, unless that worker is busier than another by more tokens than the prefix saves.
Equal costs are spread evenly by `draw`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

# One more sequence in the decode batch delays every step of a stream about as much as this many prefill tokens.
RUNNING_TOKENS: Final = 32.0
# Moving a token's KV costs a small part of computing it.
TRANSFER_WEIGHT: Final = 0.125
# Waiting for somebody else's blocks takes longer than computing one's own tokens.
SHORTAGE_WEIGHT: Final = 4.0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the router knows of one worker at one moment.

    usable: connected and not draining. num_running: running and waiting sequences. num_free_blocks: free to take,
    cached-but-unreferenced ones included. num_cached_tokens: of this request's prompt, found in the prefix index.
    """

    worker_id: str
    usable: bool
    num_blocks: int
    num_free_blocks: int
    num_running: int
    queued_prefill_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """num_tokens: prompt and already emitted tokens. failed: ids of workers on which this request failed before."""

    num_tokens: int
    block_size: int
    failed: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """prefill_id None: the decode worker computes the prompt itself. The cached counts are those that were scored."""

    prefill_id: str | None
    decode_id: str
    prefill_cached_tokens: int
    decode_cached_tokens: int


_Cost = Callable[[PlacementRequest, WorkerLoad], float]


def choose(
    request: PlacementRequest, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], draw: float
) -> Placement | None:
    """The cheapest pair, or None where no usable decode worker could hold the prompt. draw: uniform in [0, 1).

    Workers on which the request failed are taken only where no other is left. Without any usable prefill worker the
    decode worker prefills.
    """
    decode = _cheapest(request, decodes, decode_cost, draw)
    if decode is None:
        return None
    # Another draw from the same number, lest ties always pair the same two workers.
    prefill = _cheapest(request, prefills, prefill_cost, draw * 997.0 % 1.0)
    return Placement(
        prefill_id=prefill.worker_id if prefill else None,
        decode_id=decode.worker_id,
        prefill_cached_tokens=prefill.num_cached_tokens if prefill else 0,
        decode_cached_tokens=decode.num_cached_tokens,
    )


def prefill_cost(request: PlacementRequest, worker: WorkerLoad) -> float:
    """Tokens to compute before this request's first token is there."""
    return worker.queued_prefill_tokens + _uncached(request, worker)


def decode_cost(request: PlacementRequest, worker: WorkerLoad) -> float:
    """The same unit; see the head of this file."""
    uncached = _uncached(request, worker)
    shortage = max(0, uncached - worker.num_free_blocks * request.block_size)
    return RUNNING_TOKENS * worker.num_running + TRANSFER_WEIGHT * uncached + SHORTAGE_WEIGHT * shortage


def fits(request: PlacementRequest, worker: WorkerLoad) -> bool:
    """Whether the worker's whole pool could hold the prompt and one more token."""
    return request.num_tokens < worker.num_blocks * request.block_size


def room_elsewhere(num_blocks: int, decode_id: str, decodes: Sequence[WorkerLoad]) -> bool:
    """Whether a sequence that decode_id preempted should move: another decode worker has num_blocks free, and as many
    again, so that it is not preempted there."""
    return any(w.usable and w.worker_id != decode_id and w.num_free_blocks >= 2 * num_blocks for w in decodes)


def _uncached(request: PlacementRequest, worker: WorkerLoad) -> int:
    return max(0, request.num_tokens - worker.num_cached_tokens)


def _cheapest(request: PlacementRequest, workers: Sequence[WorkerLoad], cost: _Cost, draw: float) -> WorkerLoad | None:
    able = [w for w in workers if w.usable and fits(request, w)]
    candidates = [w for w in able if w.worker_id not in request.failed] or able
    if not candidates:
        return None
    costs = [cost(request, w) for w in candidates]
    least = min(costs)
    # Sorted by id: the same draw gives the same worker, whatever order the snapshot came in.
    ties = sorted((w for w, c in zip(candidates, costs, strict=True) if c == least), key=lambda w: w.worker_id)
    return ties[min(int(draw * len(ties)), len(ties) - 1)]
