"""The arithmetic of docs/AVAILABILITY.md."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.availability import (
    MONTH_S,
    Fault,
    budget_s,
    capacity_in_rollout,
    rollout_s,
    unavailable_ratio,
    workers_for,
)


def test_a_target_is_a_budget():
    assert budget_s(0.9995) == pytest.approx(1296.0)
    assert Fault("crash", a_month=30, detect_s=0.1, recover_s=5.9).down_ratio == pytest.approx(180 / MONTH_S)


def test_one_spare_is_worth_a_square():
    assert unavailable_ratio(1, 1, 0.01) == pytest.approx(0.01)
    assert unavailable_ratio(2, 1, 0.01) == pytest.approx(0.0001)
    assert unavailable_ratio(3, 2, 0.01) == pytest.approx(3 * 0.01**2 * 0.99 + 0.01**3)


@given(st.floats(0.9, 0.99999), st.integers(1, 40), st.floats(0, 0.2))
def test_the_answer_meets_the_target_and_one_fewer_does_not(target, needed, down):
    workers = workers_for(target, needed, down)
    assert unavailable_ratio(workers, needed, down) <= 1 - target
    assert workers == needed or unavailable_ratio(workers - 1, needed, down) > 1 - target


def test_what_no_number_mends_is_refused():
    with pytest.raises(ValueError, match="no answer"):
        workers_for(0.9995, 1, 0.6)


def test_a_rollout_takes_its_turns():
    assert rollout_s(10, 3, grace_s=30.0, start_s=60.0) == 360.0
    assert capacity_in_rollout(10, 3) == pytest.approx(0.7)
