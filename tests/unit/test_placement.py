"""Placement: the cheapest way to use the fleet, by the formula at the head of router/policy/placement_cost.py."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.step_rates import StepRates
from router.policy.placement import MAX_PREFIX_HOLDERS, MAX_SAMPLED, choose
from router.policy.placement_cost import PlacementRequest, WorkerLoad, decode_cost, fits, prefill_cost

BLOCK = 16
RATES = StepRates(base_s=0.005, prefill_token_s=0.0005, decode_token_s=0.0005)


def worker(worker_id: str, **changes) -> WorkerLoad:
    idle = WorkerLoad(
        worker_id,
        usable=True,
        num_blocks=1000,
        num_free_blocks=1000,
        num_running=0,
        queued_prefill_tokens=0,
        rates=RATES,
    )
    return replace(idle, **changes)


def request(num_tokens: int = 320, failed=(), **changes) -> PlacementRequest:
    return replace(PlacementRequest(num_tokens, BLOCK, failed), **changes)


def place(asked, prefills, decodes, seed=1):
    return choose(asked, prefills, decodes, random.Random(seed))


def test_the_longest_cached_prefix_wins_among_equals():
    prefills = [worker("p0", num_cached_tokens=64), worker("p1", num_cached_tokens=256), worker("p2")]
    placement = place(request(), prefills, [worker("d0")])
    assert (placement.prefill_id, placement.prefill_cached_tokens) == ("p1", 256)


def test_a_prefix_is_left_only_for_a_wait_that_is_longer_than_it_is_worth():
    for queued, wanted in ((1200, "cached"), (1400, "idle")):
        prefills = [worker("cached", num_cached_tokens=256, queued_prefill_tokens=queued), worker("idle")]
        assert place(request(), prefills, [worker("d0")]).prefill_id == wanted, "256 tokens, and four times their price"


def test_what_the_host_tier_has_is_worth_less_than_the_devices_and_more_than_nothing():
    device, host = worker("device", num_cached_tokens=256), worker("host", num_host_cached_tokens=256)
    assert place(request(), [device, host, worker("none")], [worker("d0")]).prefill_id == "device"
    placement = place(request(), [host, worker("none")], [worker("d0")])
    assert (placement.prefill_id, placement.prefill_cached_tokens) == ("host", 256)


def test_a_slow_worker_gets_a_prompt_later_than_a_fast_one():
    slow = worker("slow", rates=replace(RATES, prefill_token_s=0.001))
    assert place(request(), [slow, worker("fast", queued_prefill_tokens=160)], [worker("d0")]).prefill_id == "fast"


def test_decode_prefers_fewer_running_sequences_and_enough_free_blocks():
    busy, full = worker("busy", num_running=8), worker("full", num_free_blocks=2)
    assert place(request(), [worker("p")], [busy, full, worker("idle")]).decode_id == "idle"
    assert place(request(), [worker("p")], [busy, full]).decode_id == "busy", "waiting for blocks is worse than company"


def test_a_pool_near_its_end_is_avoided_before_it_preempts():
    near = worker("near", num_free_blocks=25)
    assert place(request(), [worker("p")], [near, worker("far", num_running=2)]).decode_id == "far"


def test_decode_prefers_its_own_cached_prefix_where_transfers_cost_more_than_they_hide():
    decodes = [worker("d0"), worker("d1", num_cached_tokens=320)]
    asked = request(token_transfer_s=0.01)
    assert place(asked, [worker("p0")], decodes).decode_id == "d1"


def test_a_short_remainder_is_computed_by_a_decode_worker_with_few_streams():
    idle, asked = worker("d0", num_cached_tokens=288), request(local_prefill_max_tokens=64, token_transfer_s=1e-5)
    busy_prefill = worker("p0", num_cached_tokens=288, queued_prefill_tokens=500)
    assert place(asked, [busy_prefill], [idle]).prefill_id is None
    placement = place(asked, [busy_prefill], [replace(idle, num_running=4)])
    assert placement.prefill_id is None, "four streams' stall is shorter than the queue"
    assert placement.decode_cached_tokens == 288


def test_a_long_remainder_goes_to_a_prefill_worker_whatever_it_costs():
    asked = request(local_prefill_max_tokens=64)
    assert place(asked, [worker("p0", queued_prefill_tokens=5000)], [worker("d0")]).prefill_id == "p0"


def test_a_prompt_that_would_stall_running_streams_goes_to_a_prefill_worker():
    asked = request(local_prefill_max_tokens=512)
    streams = worker("d0", num_running=16)
    assert place(asked, [worker("p0", queued_prefill_tokens=320)], [streams]).prefill_id == "p0"
    prompts = worker("d0", num_running=16, queued_prefill_tokens=320, num_cached_tokens=288)
    assert place(asked, [worker("p0", num_cached_tokens=288)], [prompts]).prefill_id == "p0", (
        "others' prompts stall, too"
    )


def test_where_both_phases_share_the_cores_decode_workers_compute_all_that_they_may():
    asked = request(local_prefill_max_tokens=512, shared_cores=True)
    streams = worker("d0", num_running=16, queued_prefill_tokens=3200)
    assert place(asked, [worker("p0")], [streams]).prefill_id is None
    long = request(num_tokens=513, local_prefill_max_tokens=512, shared_cores=True)
    assert place(long, [worker("p0", queued_prefill_tokens=5000)], [streams]).prefill_id == "p0"
    assert place(asked, [worker("p0")], [streams, worker("d1", num_running=3)]).decode_id == "d1"


def test_a_prefix_that_can_be_pulled_is_worth_less_than_having_it_and_more_than_computing_it():
    holder, other = worker("holder", num_cached_tokens=3200), worker("other")
    asked = request(3300, token_transfer_s=1e-5, pullable_tokens=3200)
    assert place(asked, [holder, other], [worker("d0")]).prefill_id == "holder"
    busy = replace(holder, queued_prefill_tokens=2000)
    assert place(asked, [busy, other], [worker("d0")]).prefill_id == "other", "it pulls sooner than the holder is free"
    slow_link = replace(asked, token_transfer_s=1e-3)
    assert place(slow_link, [busy, other], [worker("d0")]).prefill_id == "holder"


def test_without_a_usable_prefill_worker_decode_computes_the_prompt():
    for prefills in ([], [worker("p0", usable=False)]):
        assert place(request(), prefills, [worker("d0", num_running=5)]).prefill_id is None


def test_nothing_usable_means_no_placement():
    small = worker("d0", num_blocks=100, num_free_blocks=100)
    assert place(request(), [worker("p0")], []) is None
    assert place(request(), [worker("p0")], [replace(small, usable=False)]) is None
    assert place(request(1600), [worker("p0")], [small]) is None, "prompt as large as the pool"
    assert place(request(1599), [worker("p0")], [small]) is not None


def test_workers_that_failed_are_taken_only_where_no_other_is_left():
    workers = [worker("a"), worker("b", num_running=50, queued_prefill_tokens=5000)]
    placement = place(request(failed={"a"}), workers, workers)
    assert (placement.prefill_id, placement.decode_id) == ("b", "b")
    assert place(request(failed={"a", "b"}), workers, workers).prefill_id == "a"


def test_ties_are_spread_evenly_and_pairs_are_mixed():
    prefills, decodes = [worker("p0"), worker("p1")], [worker("d0"), worker("d1")]
    rng = random.Random(1)
    placements = [choose(request(), prefills, decodes, rng) for _ in range(1000)]
    pairs = Counter((p.prefill_id, p.decode_id) for p in placements)
    assert len(pairs) == 4
    assert min(pairs.values()) > 200


def test_the_order_of_the_snapshot_changes_nothing():
    workers = [worker(f"w{i}") for i in range(20)]
    assert place(request(), workers, workers) == place(request(), workers[::-1], workers[::-1])


def test_of_a_large_fleet_the_holders_of_the_prefix_are_always_compared_and_the_rest_share_the_load():
    prefills = [worker(f"p{i}") for i in range(100)]
    rng = random.Random(1)
    chosen = Counter(choose(request(), prefills, [worker("d0")], rng).prefill_id for _ in range(2000))
    assert len(chosen) > 90
    assert max(chosen.values()) < 60
    assert MAX_PREFIX_HOLDERS + MAX_SAMPLED < 100
    prefills[57] = worker("p57", num_cached_tokens=256)
    assert {choose(request(), prefills, [worker("d0")], rng).prefill_id for _ in range(50)} == {"p57"}


def test_a_worker_without_rates_is_priced_by_anothers():
    unknown = worker("p0", rates=None, num_cached_tokens=16)
    slow = worker("p1", rates=replace(RATES, prefill_token_s=0.1))
    assert place(request(), [unknown, slow], [worker("d0")]).prefill_id == "p0"


ids = [f"w{i}" for i in range(6)]
loads = st.builds(
    WorkerLoad,
    worker_id=st.sampled_from(ids),
    usable=st.booleans(),
    num_blocks=st.integers(0, 50),
    num_free_blocks=st.integers(0, 50),
    num_running=st.integers(0, 100),
    queued_prefill_tokens=st.integers(0, 10_000),
    num_cached_tokens=st.integers(0, 1000),
    num_host_cached_tokens=st.integers(0, 100),
    rates=st.just(RATES),
)
fleets = st.lists(loads, max_size=6, unique_by=lambda load: load.worker_id)


def total_cost(asked, prefill, decode, *, only):
    """Of one way to serve the request; None where it is not allowed."""
    cost = decode_cost(asked, decode, RATES, only=only)
    if prefill is None:
        local = cost.local
        return local and cost.ttft_s + local.work_s + local.harm_s + local.capacity_s + cost.other_s
    work = prefill_cost(asked, prefill, RATES)
    handoff_s = max(0.0, cost.transfer_s - work.computing_s)
    return cost.ttft_s + work.work_s + work.capacity_s + handoff_s + cost.other_s


@given(st.integers(1, 900), st.sets(st.sampled_from(ids)), st.integers(0, 300), fleets, fleets, st.integers(0, 9))
def test_whatever_the_fleet_the_choice_is_usable_and_no_other_is_cheaper(
    num_tokens, failed, local_max, prefills, decodes, seed
):
    asked = request(num_tokens, failed, local_prefill_max_tokens=local_max, token_transfer_s=1e-4)
    placement = place(asked, prefills, decodes, seed)
    able = [d for d in decodes if d.usable and fits(asked, d)]
    assert (placement is None) == (not able)
    if placement is None:
        return

    def peers(workers):
        usable = [w for w in workers if w.usable and fits(asked, w)]
        return [w for w in usable if w.worker_id not in failed] or usable

    only = not peers(prefills)
    costs = {
        (prefill and prefill.worker_id, decode.worker_id): total_cost(asked, prefill, decode, only=only)
        for prefill in (None, *peers(prefills))
        for decode in peers(decodes)
    }
    chosen = costs[placement.prefill_id, placement.decode_id]
    assert chosen is not None
    assert chosen <= min(cost for cost in costs.values() if cost is not None) + 3e-6
