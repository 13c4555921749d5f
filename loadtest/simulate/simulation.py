"""One trace through one fleet under one routing policy, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.simulate.clock import VirtualClock
from loadtest.simulate.routing import MakeRouter
from loadtest.simulate.workers import Machine, SimDecode, SimPrefill, SimRequest
from loadtest.traces import TraceEntry


@dataclass(frozen=True, slots=True)
class Fleet:
    num_prefill: int
    num_decode: int
    machine: Machine


@dataclass(frozen=True, slots=True)
class Outcome:
    """hit_rate: of all prompt tokens, those that whoever computed the prompt had cached. local: part of the requests
    whose prompt the decode worker computed. Seconds; tpot: of requests with more than one token.
    """

    hit_rate: float
    local: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float


def simulate(trace: Sequence[TraceEntry], fleet: Fleet, make_router: MakeRouter) -> Outcome:
    """All of `trace`, to the last token. Deterministic."""
    clock, machine = VirtualClock(), fleet.machine
    prefills = [SimPrefill(f"p{i}", machine, clock) for i in range(fleet.num_prefill)]
    decodes = [SimDecode(f"d{i}", machine, clock) for i in range(fleet.num_decode)]
    router = make_router(prefills, decodes, machine)
    requests = [SimRequest(entry, entry.at_s) for entry in trace]

    def start(request: SimRequest) -> None:
        route = router.route(request, clock.now)
        decode, prefill = route.decode, route.prefill

        def note_first_token() -> None:
            request.first_token_at = clock.now

        decode.take_blocks(request)
        if prefill is None:
            decode.prefill_here(request, note_first_token)
            return
        blocks = decode.cache.num_cached(request.entry.block_ids)
        missing = max(0, request.entry.input_tokens - blocks * machine.block_tokens)
        decode.num_expected += 1
        submitted_at = clock.now

        def hand_over() -> None:
            note_first_token()
            # What the computing did not cover; at least the last chunk's KV comes after it.
            rest_s = max(
                missing * machine.token_transfer_s - (clock.now - submitted_at),
                min(missing, 2048) * machine.token_transfer_s,
            )
            clock.at(clock.now + rest_s, lambda: decode.join(request))

        prefill.submit(request, hand_over)

    for request in requests:
        clock.at(request.arrived_at, lambda request=request: start(request))  # type: ignore[misc]
    clock.run()
    return _outcome(requests)


def _outcome(requests: Sequence[SimRequest]) -> Outcome:
    ttft = [r.first_token_at - r.arrived_at for r in requests]
    tpot = [
        (r.ended_at - r.first_token_at) / (r.entry.output_tokens - 1) for r in requests if r.entry.output_tokens > 1
    ]
    return Outcome(
        hit_rate=sum(r.num_cached_tokens for r in requests) / sum(r.entry.input_tokens for r in requests),
        local=sum(r.was_local for r in requests) / len(requests),
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p95_s=_percentile(ttft, 95),
        tpot_p50_s=_percentile(tpot, 50),
        tpot_p95_s=_percentile(tpot, 95),
    )


def _percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q)) if values else 0.0
