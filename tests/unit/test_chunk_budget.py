"""The chunk budget: within its bounds, at its target whatever a machine's steps cost, and then at rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.chunk_budget import BudgetLimits, ChunkBudget, first_budget, next_budget

LIMITS = BudgetLimits(ceiling_tokens=2048, target_s=0.05)


def run(
    limits: BudgetLimits, budget: ChunkBudget, num_steps: int, decode_s, token_s, num_decodes=8
) -> list[ChunkBudget]:
    """A machine whose step takes decode_s and token_s for each token of chunks, prompts never ending."""
    budgets = []
    for _ in range(num_steps):
        step_s = (decode_s if num_decodes else 0.0) + budget.tokens * token_s
        budget = next_budget(budget, limits, budget.tokens, num_decodes, step_s)
        budgets.append(budget)
    return budgets


@settings(deadline=None)
@given(
    decode_s=st.floats(0.001, 0.04),
    token_s=st.floats(1e-6, 3e-4),
    believed_token_s=st.floats(1e-6, 1e-2),
    believed_decode_s=st.floats(0.0, 0.2),
)
def test_it_reaches_the_target_from_any_belief_and_rests(decode_s, token_s, believed_token_s, believed_decode_s):
    start = first_budget(LIMITS, believed_token_s)
    start = ChunkBudget(start.tokens, believed_decode_s, start.token_s)
    budgets = run(LIMITS, start, 400, decode_s, token_s)
    assert all(32 <= b.tokens <= 2048 for b in budgets)
    assert len({b.tokens for b in budgets[300:]}) == 1, "it swings"
    last = budgets[-1].tokens
    step_s = decode_s + last * token_s
    assert last == 32 or step_s * (last * 7 / 8 - 1) <= 0.05 * last, "too long"
    assert last * 9 / 8 >= 2048 or step_s * (last * 9 / 8 + 1) >= 0.05 * last, "room left"


def test_a_slower_machine_gets_smaller_chunks_at_once_and_a_faster_one_by_and_by():
    calm = run(LIMITS, first_budget(LIMITS), 100, 0.01, 1e-4)[-1]
    assert calm.tokens == pytest.approx(400, rel=0.15)
    slowed = run(LIMITS, calm, 60, 0.01, 4e-4)
    assert slowed[-1].tokens == pytest.approx(100, rel=0.2)
    assert slowed[0].tokens < calm.tokens
    again = run(LIMITS, slowed[-1], 100, 0.01, 1e-4)
    assert again[-1].tokens == pytest.approx(400, rel=0.2)
    assert all(b.tokens <= 2 * a.tokens for a, b in pairwise(again))


def test_more_decodes_leave_less_for_chunks():
    budget = run(LIMITS, first_budget(LIMITS), 50, 0.005, 1e-4)[-1]
    for _ in range(50):
        budget = next_budget(budget, LIMITS, 0, 16, 0.03)
    assert budget.tokens == pytest.approx(200, rel=0.15)


def test_noise_inside_the_dead_band_changes_nothing():
    budget = run(LIMITS, first_budget(LIMITS), 100, 0.01, 1e-4)[-1]
    tokens = budget.tokens
    for i in range(200):
        step_s = (0.01 + tokens * 1e-4) * (1.05 if i % 2 else 0.95)
        budget = next_budget(budget, LIMITS, budget.tokens, 8, step_s)
        assert budget.tokens == tokens


def test_one_outlier_does_not_starve_prompts():
    budget = run(LIMITS, first_budget(LIMITS), 100, 0.01, 1e-4)[-1]
    after = next_budget(budget, LIMITS, budget.tokens, 8, 30.0)
    assert after.tokens >= budget.tokens // 2


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 64), st.floats(-1.0, 1e6)), max_size=50),
    st.integers(1, 5000),
    st.floats(0.0, 10.0),
)
def test_whatever_is_measured_the_budget_stays_in_its_bounds_and_repeats(steps, ceiling, target_s):
    limits = BudgetLimits(ceiling, target_s)

    def replay() -> list[int]:
        budget, tokens = first_budget(limits, 1e-3), []
        for num_chunk_tokens, num_decodes, step_s in steps:
            budget = next_budget(budget, limits, num_chunk_tokens, num_decodes, step_s)
            tokens.append(budget.tokens)
        return tokens

    tokens = replay()
    assert tokens == replay()
    assert all(min(32, ceiling) <= n <= ceiling for n in tokens)


def test_without_a_target_the_ceiling_holds():
    limits = BudgetLimits(256)
    assert next_budget(first_budget(limits, 1.0), limits, 256, 8, 100.0).tokens == 256
