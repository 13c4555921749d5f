"""What the hand-over benchmark makes of its measurements."""

from __future__ import annotations

import pytest

from loadtest.bench_overlap import Answer, Turn, summarise


def turn(drift: float, *, token: int = 7) -> Turn:
    """A pair in which transferring takes 10 ms of 200 more, on a machine that is `drift` times slower."""
    two, one = Answer(0.19 * drift, 0.21 * drift, [token]), Answer(0.19 * drift, 0.2 * drift, [7])
    return Turn(two, one, two, one, 0.003, 22.0 * 2**20, 2.0**20)


def test_what_is_added_is_told_by_pairs_and_does_not_follow_the_machine_s_drift() -> None:
    row = summarise(1024, [turn(1.0), turn(1.0), turn(3.0)])
    assert row["added_to_second_token"] == pytest.approx(0.05)
    assert row["added_between_tokens"] == pytest.approx(0.05)
    assert (row["first_turn_mib"], row["second_turn_mib"]) == (22.0, 1.0)
    assert row["same_tokens"]


def test_answers_that_differ_are_told() -> None:
    assert not summarise(1024, [turn(1.0), turn(1.0, token=8)])["same_tokens"]
