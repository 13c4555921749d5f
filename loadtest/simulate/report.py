"""`baton bench simulate`: the routing policies side by side over one trace, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from common.step_rates import StepRates
from loadtest.errors import BenchError
from loadtest.simulate.cache import pooled_hit_rate
from loadtest.simulate.routing import routers
from loadtest.simulate.simulation import Fleet, Outcome, simulate
from loadtest.simulate.workers import Machine
from loadtest.traces import MOONCAKE_BLOCK_TOKENS, TraceEntry, read_trace

# A 70B-class model on 8 GPUs: 10,000 prompt tokens/s, 320 KB of KV a token over 400 Gb/s.
RATES: Final = StepRates(base_s=8e-3, prefill_token_s=1e-4, decode_token_s=2e-4)
TOKEN_TRANSFER_S: Final = 320e3 / 50e9


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """cache_tokens: of each worker's KV pool. speed: the trace is replayed so many times faster."""

    trace: Path
    prefill: int
    decode: int
    cache_tokens: int
    speed: float
    requests: int
    local_prefill_max_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hit rates of one cache as large as all prefill workers' together, and of one without end: bounds for a router."""

    num_requests: int
    pooled_hit_rate: float
    infinite_hit_rate: float
    outcomes: dict[str, Outcome]


def compare(options: SimulateOptions) -> Comparison:
    """Raises BenchError for a trace that can't be read, or tells nothing of prefixes."""
    trace = _scaled(read_trace(options.trace), options)
    if not any(entry.block_ids for entry in trace):
        raise BenchError(f"trace {options.trace}: tells nothing about shared prefixes; a Mooncake trace does")
    machine = Machine(RATES, options.cache_tokens // MOONCAKE_BLOCK_TOKENS, MOONCAKE_BLOCK_TOKENS, TOKEN_TRANSFER_S)
    fleet = Fleet(options.prefill, options.decode, machine)
    pooled_blocks = machine.cache_blocks * options.prefill
    return Comparison(
        num_requests=len(trace),
        pooled_hit_rate=pooled_hit_rate(trace, pooled_blocks, MOONCAKE_BLOCK_TOKENS),
        infinite_hit_rate=pooled_hit_rate(trace, None, MOONCAKE_BLOCK_TOKENS),
        outcomes={
            name: simulate(trace, fleet, make) for name, make in routers(options.local_prefill_max_tokens).items()
        },
    )


def print_comparison(comparison: Comparison, console: Console) -> None:
    table = Table("policy", "hit rate", "of the caches'", "local", "TTFT p50", "p95", "TPOT p50", "p95", box=None)
    for name, outcome in comparison.outcomes.items():
        table.add_row(
            name,
            f"{outcome.hit_rate:.1%}",
            f"{outcome.hit_rate / comparison.pooled_hit_rate:.1%}" if comparison.pooled_hit_rate else "-",
            f"{outcome.local:.1%}",
            *(f"{value:.2f} s" for value in (outcome.ttft_p50_s, outcome.ttft_p95_s)),
            *(f"{value * 1e3:.1f} ms" for value in (outcome.tpot_p50_s, outcome.tpot_p95_s)),
        )
    console.print(
        f"{comparison.num_requests} requests; one cache of the prefill workers' size would hit "
        f"{comparison.pooled_hit_rate:.1%}, one without end {comparison.infinite_hit_rate:.1%}"
    )
    console.print(table)


def _scaled(trace: Sequence[TraceEntry], options: SimulateOptions) -> list[TraceEntry]:
    kept = trace[: options.requests] if options.requests else trace
    return [replace(entry, at_s=entry.at_s / options.speed) for entry in kept]
