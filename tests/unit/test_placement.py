"""Placement: the cheapest usable pair, by the formula at the head of router/policy/placement.py."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.policy.placement import PlacementRequest, WorkerLoad, choose, decode_cost, fits, prefill_cost

BLOCK = 16


def worker(worker_id: str, **changes) -> WorkerLoad:
    idle = WorkerLoad(
        worker_id, usable=True, num_blocks=100, num_free_blocks=100, num_running=0, queued_prefill_tokens=0
    )
    return replace(idle, **changes)


def request(num_tokens: int = 320, failed=()) -> PlacementRequest:
    return PlacementRequest(num_tokens, BLOCK, failed)


def test_the_longest_cached_prefix_wins_among_equals():
    prefills = [worker("p0", num_cached_tokens=64), worker("p1", num_cached_tokens=256), worker("p2")]
    placement = choose(request(), prefills, [worker("d0")], 0.0)
    assert (placement.prefill_id, placement.prefill_cached_tokens) == ("p1", 256)


def test_a_prefix_is_not_worth_a_longer_queue_than_it_saves():
    for queued, wanted in ((250, "cached"), (260, "idle")):
        prefills = [worker("cached", num_cached_tokens=256, queued_prefill_tokens=queued), worker("idle")]
        assert choose(request(), prefills, [worker("d0")], 0.5).prefill_id == wanted


def test_decode_prefers_fewer_running_sequences_and_enough_free_blocks():
    busy, full = worker("busy", num_running=8), worker("full", num_free_blocks=2)
    assert choose(request(), [], [busy, full, worker("idle")], 0.0).decode_id == "idle"
    assert choose(request(), [], [busy, full], 0.0).decode_id == "busy", "waiting for blocks is worse than company"


def test_decode_prefers_its_own_cached_prefix():
    decodes = [worker("d0"), worker("d1", num_cached_tokens=320)]
    assert choose(request(), [worker("p0")], decodes, 0.0).decode_id == "d1"


def test_without_a_usable_prefill_worker_decode_computes_the_prompt():
    for prefills in ([], [worker("p0", usable=False)]):
        assert choose(request(), prefills, [worker("d0")], 0.0).prefill_id is None


def test_nothing_usable_means_no_placement():
    assert choose(request(), [worker("p0")], [], 0.0) is None
    assert choose(request(), [worker("p0")], [worker("d0", usable=False)], 0.0) is None
    assert choose(request(1600), [worker("p0")], [worker("d0")], 0.0) is None, "prompt as large as the pool"
    assert choose(request(1599), [worker("p0")], [worker("d0")], 0.0) is not None


def test_workers_that_failed_are_taken_only_where_no_other_is_left():
    workers = [worker("a"), worker("b", num_running=50, queued_prefill_tokens=5000)]
    placement = choose(request(failed={"a"}), workers, workers, 0.0)
    assert (placement.prefill_id, placement.decode_id) == ("b", "b")
    assert choose(request(failed={"a", "b"}), workers, workers, 0.0).prefill_id == "a"


def test_ties_are_spread_evenly_and_pairs_are_mixed():
    prefills, decodes = [worker("p0"), worker("p1")], [worker("d0"), worker("d1")]
    rng = random.Random(1)
    placements = [choose(request(), prefills, decodes, rng.random()) for _ in range(1000)]
    pairs = Counter((p.prefill_id, p.decode_id) for p in placements)
    assert len(pairs) == 4
    assert min(pairs.values()) > 200


def test_the_order_of_the_snapshot_changes_nothing():
    workers = [worker(f"w{i}") for i in range(5)]
    assert choose(request(), workers, workers, 0.7) == choose(request(), workers[::-1], workers[::-1], 0.7)


loads = st.builds(
    WorkerLoad,
    worker_id=st.sampled_from([f"w{i}" for i in range(6)]),
    usable=st.booleans(),
    num_blocks=st.integers(0, 50),
    num_free_blocks=st.integers(0, 50),
    num_running=st.integers(0, 100),
    queued_prefill_tokens=st.integers(0, 10_000),
    num_cached_tokens=st.integers(0, 1000),
)
fleets = st.lists(loads, max_size=6, unique_by=lambda load: load.worker_id)


@given(
    st.integers(1, 900), st.sets(st.sampled_from([f"w{i}" for i in range(6)])), fleets, fleets, st.floats(0, 0.999999)
)
def test_whatever_the_fleet_the_choice_is_usable_and_no_other_is_cheaper(num_tokens, failed, prefills, decodes, draw):
    asked = request(num_tokens, failed)
    placement = choose(asked, prefills, decodes, draw)
    able = [d for d in decodes if d.usable and fits(asked, d)]
    assert (placement is None) == (not able)
    if placement is None:
        return
    for chosen_id, workers, cost in (
        (placement.decode_id, decodes, decode_cost),
        (placement.prefill_id, prefills, prefill_cost),
    ):
        usable = [w for w in workers if w.usable and fits(asked, w)]
        if chosen_id is None:
            assert not usable
            continue
        chosen = next(w for w in workers if w.worker_id == chosen_id)
        peers = [w for w in usable if w.worker_id not in failed] or usable
        assert chosen in peers
        assert cost(asked, chosen) == min(cost(asked, w) for w in peers)
