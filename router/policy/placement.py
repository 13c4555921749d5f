"""Which prefill and which decode worker a request goes to. Pure: the caller brings the snapshot and the randomness.

The pair of the least cost wins (router/policy/placement_cost.py; docs/PLACEMENT.md), or the decode worker alone where
it would compute the little that is missing itself sooner and without harm to its streams; where both share the cores,
alone whenever it may. Equal costs are spread evenly. Session affinity is nobody's rule: where the prefix lies, less is
missing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import inf
from typing import Final

from common.step_rates import StepRates
from router.policy.placement_cost import (
    DEFAULT_RATES,
    DecodeCost,
    PlacementRequest,
    PrefillCost,
    WorkerLoad,
    decode_cost,
    fits,
    prefill_cost,
)

# Of a large fleet, so many workers a role are compared: those with the longest prefixes, the rest at random. Routers
# that see the same figures then don't all choose the same worker, and a placement costs the same at any size.
MAX_PREFIX_HOLDERS: Final = 4
MAX_SAMPLED: Final = 4
# Costs that differ by less are equal: the model is not that good.
TIE_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Placement:
    """prefill_id None: the decode worker computes the prompt itself. The cached counts are those that were scored.

    ttft_s: predicted seconds from the command to the first token.
    """

    prefill_id: str | None
    decode_id: str
    prefill_cached_tokens: int
    decode_cached_tokens: int
    ttft_s: float


# Cost and predicted time to first token, in seconds; prefill worker, if any; decode worker.
_Option = tuple[float, float, WorkerLoad | None, WorkerLoad]


def choose(
    request: PlacementRequest, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad], rng: random.Random
) -> Placement | None:
    """The cheapest option, or None where no usable decode worker could hold the prompt.

    Workers on which the request failed are taken only where no other is left. Without any usable prefill worker the
    decode worker prefills.
    """
    few_decodes, few_prefills = (_shortlist(_candidates(request, w), rng) for w in (decodes, prefills))
    if not few_decodes:
        return None
    prefill_rates, decode_rates = _known_rates(few_prefills, few_decodes), _known_rates(few_decodes, few_prefills)
    priced_prefills = [(w, prefill_cost(request, w, w.rates or prefill_rates)) for w in few_prefills]
    best: list[_Option] = []
    least = inf
    for decode in few_decodes:
        cost = decode_cost(request, decode, decode.rates or decode_rates, only=not few_prefills)
        # On shared cores neither streams nor queues fare better where another process computes the prompt.
        rivals = () if request.shared_cores and cost.local is not None else priced_prefills
        for option in _options(decode, cost, rivals):
            if option[0] < least - TIE_S:
                best, least = [option], option[0]
            elif option[0] <= least + TIE_S:
                best.append(option)
    return _placement(rng.choice(best))


def _options(decode: WorkerLoad, cost: DecodeCost, prefills: Sequence[tuple[WorkerLoad, PrefillCost]]) -> list[_Option]:
    """Every way to use this decode worker."""
    base_s, ttft_s, transfer_s = cost.ttft_s + cost.other_s, cost.ttft_s, cost.transfer_s
    options: list[_Option] = []
    for prefill, work in prefills:
        total_s = base_s + work.work_s + work.capacity_s
        if transfer_s > work.computing_s:
            total_s += transfer_s - work.computing_s
        options.append((total_s, ttft_s + work.work_s, prefill, decode))
    if (local := cost.local) is not None:
        options.append((base_s + local.work_s + local.harm_s + local.capacity_s, ttft_s + local.work_s, None, decode))
    return options


def _placement(option: _Option) -> Placement:
    _, ttft_s, prefill, decode = option
    return Placement(
        prefill_id=prefill.worker_id if prefill else None,
        decode_id=decode.worker_id,
        prefill_cached_tokens=prefill.num_cached_tokens + prefill.num_host_cached_tokens if prefill else 0,
        decode_cached_tokens=decode.num_cached_tokens + decode.num_host_cached_tokens,
        ttft_s=ttft_s,
    )


def room_elsewhere(num_blocks: int, decode_id: str, decodes: Sequence[WorkerLoad]) -> bool:
    """Whether a sequence that decode_id preempted should move: another decode worker has num_blocks free, and as many
    again, so that it is not preempted there."""
    return any(w.usable and w.worker_id != decode_id and w.num_free_blocks >= 2 * num_blocks for w in decodes)


def _candidates(request: PlacementRequest, workers: Sequence[WorkerLoad]) -> list[WorkerLoad]:
    able = [w for w in workers if w.usable and fits(request, w)]
    good = [w for w in able if w.worker_id not in request.failed] or able
    # Sorted by id: the same randomness gives the same worker, whatever order the snapshot came in.
    return sorted(good, key=lambda w: w.worker_id)


def _shortlist(workers: list[WorkerLoad], rng: random.Random) -> list[WorkerLoad]:
    if len(workers) <= MAX_PREFIX_HOLDERS + MAX_SAMPLED:
        return workers
    holders = nlargest(
        MAX_PREFIX_HOLDERS,
        [w for w in workers if w.num_cached_tokens + w.num_host_cached_tokens],
        key=lambda w: (w.num_cached_tokens + w.num_host_cached_tokens, -w.queued_prefill_tokens, -w.num_running),
    )
    held = {w.worker_id for w in holders}
    return holders + rng.sample([w for w in workers if w.worker_id not in held], MAX_SAMPLED)


def _known_rates(of_role: Sequence[WorkerLoad], others: Sequence[WorkerLoad]) -> StepRates:
    """What stands for the rates of a worker that has reported none: another's, of the same role if possible."""
    return next((w.rates for w in (*of_role, *others) if w.rates is not None), DEFAULT_RATES)
