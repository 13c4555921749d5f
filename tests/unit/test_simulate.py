"""The simulator: conservation, determinism, and that routing by cost beats simple policies where prefixes repeat."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.simulate.cache import LruCache, pooled_hit_rate
from loadtest.simulate.report import RATES, TOKEN_TRANSFER_S, SimulateOptions, compare
from loadtest.simulate.routing import routers
from loadtest.simulate.simulation import Fleet, simulate
from loadtest.simulate.workers import Machine
from loadtest.traces import TraceEntry, read_trace

BLOCK = 512
TRACE = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "mooncake_conversation.jsonl"


def conversations(num_users: int, num_turns: int, seed: int = 1) -> list[TraceEntry]:
    """Users who share a system prompt of two blocks, and whose turns each add some blocks to their last prompt."""
    rng = random.Random(seed)
    entries, next_id = [], 2
    for user in range(num_users):
        block_ids, at_s = [0, 1], user * 0.4
        for _ in range(num_turns):
            grown = rng.randrange(2, 14)
            block_ids = [*block_ids, *range(next_id, next_id + grown)]
            next_id += grown
            entries.append(TraceEntry(at_s, len(block_ids) * BLOCK + 100, rng.randrange(50, 300), tuple(block_ids)))
            at_s += rng.uniform(5, 40)
    return sorted(entries, key=lambda e: e.at_s)


def fleet(cache_blocks: int = 2000) -> Fleet:
    return Fleet(4, 2, Machine(RATES, cache_blocks, BLOCK, TOKEN_TRANSFER_S))


def test_routing_by_cost_has_the_caches_hits_and_the_shortest_tail():
    trace = conversations(60, 8)
    outcomes = {name: simulate(trace, fleet(), make) for name, make in routers(512).items()}
    baton = outcomes.pop("Baton")
    assert baton.hit_rate >= 0.95 * pooled_hit_rate(trace, 4 * 2000, BLOCK)
    for name, other in outcomes.items():
        assert baton.ttft_p95_s < other.ttft_p95_s, name


def test_the_same_trace_gives_the_same_figures_and_serves_everyone():
    trace = conversations(10, 4)
    for name, make in routers(512).items():
        first = simulate(trace, fleet(), make)
        assert first == simulate(trace, fleet(), make), name
        assert 0 < first.ttft_p50_s <= first.ttft_p95_s, "who was never served would have had its token before it came"
        assert first.tpot_p50_s >= RATES.step_s(0, 1)


def test_a_prompt_alone_takes_what_the_rates_say():
    entry = TraceEntry(0.0, 4096, 11, tuple(range(8)))
    slow_link = replace(fleet(), machine=Machine(RATES, 2000, BLOCK, 1e-2))
    for where, local, prefill_steps, handoff_s in ((fleet(), 0, 2, TOKEN_TRANSFER_S * 2048), (slow_link, 4096, 16, 0)):
        outcome = simulate([entry], where, routers(local)["Baton"])
        expected_s = prefill_steps * RATES.base_s + 4096 * RATES.prefill_token_s
        assert outcome.ttft_p50_s == pytest.approx(expected_s, rel=1e-6)
        assert outcome.local == (local > 0)
        assert outcome.tpot_p50_s == pytest.approx(RATES.step_s(0, 1) + handoff_s / 10, rel=0.01)


def test_what_an_earlier_turn_left_is_not_computed_again():
    first = TraceEntry(0.0, 4196, 2, tuple(range(8)))
    later = TraceEntry(60.0, 8292, 2, tuple(range(16)))
    outcome = simulate([first, later], fleet(), routers(0)["Baton"])
    assert outcome.hit_rate == pytest.approx(4096 / (4196 + 8292))


def test_a_cache_forgets_what_was_used_least_recently_and_tails_first():
    cache = LruCache(4)
    cache.use((1, 2, 3))
    cache.use((7, 8))
    assert (cache.num_cached((1, 2, 3)), cache.num_cached((7, 8))) == (2, 2)
    cache.use((1, 2))
    cache.use((9,))
    assert (cache.num_cached((1, 2)), cache.num_cached((7, 8))) == (2, 1)


@pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not on this machine")
@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_on_the_mooncake_trace_baton_has_the_caches_hits_and_the_shortest_tail(speed):
    options = SimulateOptions(TRACE, 8, 4, 2_048_000, speed, 3000, 512)
    comparison = compare(options)
    baton = comparison.outcomes.pop("Baton")
    assert baton.hit_rate >= 0.95 * comparison.pooled_hit_rate
    assert baton.ttft_p95_s < min(other.ttft_p95_s for other in comparison.outcomes.values())


def test_a_trace_reader_scales_time_only(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n')
    entry = read_trace(path)[0]
    assert replace(entry, at_s=0.0).block_ids == (1, 2)
    outcomes = compare(SimulateOptions(path, 2, 1, 1 << 20, 2.0, 0, 0)).outcomes
    assert {outcome.local for outcome in outcomes.values()} == {0.0}
