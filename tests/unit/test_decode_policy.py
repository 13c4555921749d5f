"""Room for a sequence and for its neighbours; who gives way, and how its KV comes back: pure, and never a dead end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.cost_rates import CostRates, quantised_ns
from common.kvcache.block_table import num_blocks_for_tokens
from decode_service.policy import head_room, tokens_to_reserve
from decode_service.preemption import (
    MAX_PREEMPTIONS,
    Candidate,
    Holder,
    Means,
    choose_victim,
    is_worth_moving,
    steps_until_free,
    youngest,
)
from decode_service.sequence import DecodeSequence
from tests.unit.engine_fakes import make_spec

BLOCK_SIZE = 4
RATES = CostRates(token_ns=1000, attention_tokens=1000, block_copy_ns=100, step_ns=5000)


def make_sequence(num_tokens: int, num_prompt_tokens: int, max_tokens: int) -> DecodeSequence:
    spec = make_spec("t", [1] * num_tokens, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
    return DecodeSequence(spec, 1, 0, 0.0, BLOCK_SIZE)


@settings(deadline=None)
@given(st.integers(1, 63), st.integers(1, 100), st.integers(0, 3), st.booleans(), st.data())
def test_a_sequence_gets_what_it_has_and_no_more_than_it_can_use(num_tokens, max_tokens, horizon, guaranteed, data):
    num_prompt_tokens = data.draw(st.integers(max(1, num_tokens - max_tokens + 1), num_tokens))
    sequence = make_sequence(num_tokens, num_prompt_tokens, max_tokens)
    sequence.num_preemptions = MAX_PREEMPTIONS if guaranteed else 0
    room = tokens_to_reserve(sequence, 64, horizon)
    last_position = min(num_prompt_tokens + max_tokens, 64) - 1  # the last token's own KV is never needed
    assert num_tokens <= room <= max(num_tokens, last_position)
    assert num_blocks_for_tokens(room, BLOCK_SIZE) <= 64 // BLOCK_SIZE  # alone, it fits a pool of one context
    if guaranteed:
        assert room >= last_position
    else:
        assert room <= num_tokens + horizon * BLOCK_SIZE


def test_head_room_is_what_those_who_run_lack_for_their_horizon():
    """Within a horizon nobody's wish goes unmet, so nobody is preempted before it has passed."""
    near_its_end, at_an_edge, with_room = (make_sequence(8, 4, n) for n in (5, 50, 50))
    for sequence, blocks in ((near_its_end, 2), (at_an_edge, 2), (with_room, 3)):
        sequence.block_table.append(range(blocks))
    assert head_room([near_its_end], 64, 1) == 0
    assert head_room([at_an_edge], 64, 1) == 1
    assert head_room([with_room], 64, 1) == 0
    assert head_room([near_its_end, at_an_edge, with_room], 64, 2) == 3


def candidate(**fields) -> Candidate:
    values = {
        "priority": 0, "arrival": 0, "num_tokens": 10, "num_kept_tokens": 0, "num_saved_tokens": 8,
        "num_freed_blocks": 3, "num_saves": 2, "num_loads": 2, "can_swap": False,
    }  # fmt: skip
    return Candidate(**(values | fields))


def victim(*candidates: Candidate) -> tuple[int, Means]:
    return choose_victim(candidates, RATES)


def test_the_least_urgent_class_gives_way_whatever_it_costs():
    assert victim(candidate(priority=-1, num_tokens=1), candidate(priority=4, num_tokens=900), candidate())[0] == 1


def test_of_a_class_the_least_loss_a_block_gives_way_and_of_about_equals_the_youngest():
    assert victim(candidate(arrival=3), candidate(arrival=7), candidate(arrival=5))[0] == 1
    cheap, dear = candidate(arrival=1, num_tokens=10), candidate(arrival=2, num_tokens=24)
    assert victim(cheap, dear)[0] == 0
    assert victim(cheap, candidate(arrival=2, num_tokens=19))[0] == 1, "a prediction is no better than its rates"
    assert victim(cheap, candidate(arrival=2, num_tokens=100, num_freed_blocks=25))[0] == 1, "more blocks for more loss"
    shared = candidate(arrival=1, num_tokens=100, num_kept_tokens=96, num_freed_blocks=1)
    assert victim(shared, candidate(arrival=2, num_tokens=90, num_freed_blocks=9))[0] == 0, (
        "what others hold is not lost"
    )
    saved = candidate(arrival=1, can_swap=True, num_saves=0)
    assert victim(saved, candidate(arrival=2)) == (0, Means.SWAP)


def test_who_frees_nothing_is_the_last_resort():
    assert victim(candidate(num_freed_blocks=0, num_kept_tokens=10, arrival=9), candidate(num_tokens=60))[0] == 1
    assert victim(candidate(num_freed_blocks=0), candidate(num_freed_blocks=0, arrival=1))[0] == 1


def test_the_means_is_the_cheaper_one_and_swapping_needs_room():
    assert victim(candidate(can_swap=True))[1] is Means.SWAP
    assert victim(candidate(can_swap=False))[1] is Means.RECOMPUTE
    assert victim(candidate(can_swap=True, num_saves=90, num_loads=90))[1] is Means.RECOMPUTE
    assert victim(candidate(can_swap=True, num_tokens=3, num_saved_tokens=0, num_saves=0, num_loads=0))[1] is (
        Means.RECOMPUTE
    ), "nothing to save"


@given(st.lists(st.builds(candidate, arrival=st.integers(0, 99), num_tokens=st.integers(0, 500)), min_size=1))
def test_the_yardstick_takes_the_newest(candidates):
    index, means = youngest(candidates, RATES)
    assert candidates[index].arrival == max(c.arrival for c in candidates)
    assert means is Means.RECOMPUTE


@settings(deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 20),
    st.lists(st.builds(Holder, num_blocks=st.integers(1, 9), num_left_tokens=st.integers(1, 50)), max_size=6),
)
def test_blocks_are_foretold_for_the_moment_that_somebody_ends(needed, free, holders):
    steps = steps_until_free(needed, free, holders, BLOCK_SIZE)
    if needed <= free or not holders:
        assert steps == 0
        return
    assert steps in {holder.num_left_tokens for holder in holders}
    assert steps <= steps_until_free(needed + 1, free, holders, BLOCK_SIZE), "more blocks never come sooner"


def test_moving_pays_where_the_wait_is_longer_than_the_work():
    assert is_worth_moving(10, stay_steps=40, loss_ns=0, num_blocks=3, rates=RATES)
    assert not is_worth_moving(10, stay_steps=1, loss_ns=0, num_blocks=3, rates=RATES)
    assert not is_worth_moving(1000, stay_steps=40, loss_ns=0, num_blocks=250, rates=RATES)


def test_computing_costs_more_with_context_and_adds_up():
    assert RATES.compute_ns(0, 100) == pytest.approx(RATES.compute_ns(0, 50) + RATES.compute_ns(50, 100), abs=1)
    assert RATES.compute_ns(1000, 1010) > RATES.compute_ns(0, 10)


@pytest.mark.parametrize(("seconds", "ns"), [(0.0, 1), (1e-9, 1), (250e-6, 1 << 18), (330e-6, 1 << 18), (1.0, 1 << 30)])
def test_rates_are_powers_of_two(seconds, ns):
    assert quantised_ns(seconds) == ns
