"""What becomes of a request whose workers fail: who kills is stopped, who was only unlucky goes on."""

from __future__ import annotations

from itertools import accumulate

import pytest

from router.policy.suspicion import (
    MAX_ATTEMPTS,
    MAX_SILENCES,
    PROVEN_TOKENS,
    Record,
    Verdict,
    after_failure,
    verdict,
)


def after(*failures: dict) -> list[Verdict]:
    """The verdict after each failure; one after a trial's verdict is on trial."""

    def step(state: tuple[Record, Verdict], failure: dict) -> tuple[Record, Verdict]:
        record = after_failure(state[0], on_trial=state[1] is Verdict.TRIAL, **failure)
        return record, verdict(record)

    states = accumulate(failures, step, initial=(Record(), Verdict.AGAIN))
    return [said for _, said in states][1:]


DIED = {"num_tokens": 0, "died": True}
SILENT = {"num_tokens": 0, "died": True, "silent": True}
FAILED = {"num_tokens": 0, "died": False}


def test_a_prompt_that_kills_takes_two_workers() -> None:
    assert after(DIED, DIED) == [Verdict.TRIAL, Verdict.GUILTY]


def test_failures_without_progress_are_bounded() -> None:
    assert after(*[FAILED] * MAX_ATTEMPTS)[-1] is Verdict.GIVE_UP


def test_a_worker_that_is_slow_on_a_busy_machine_costs_no_attempt() -> None:
    verdicts = after(*[SILENT] * MAX_SILENCES)
    assert verdicts[0] is Verdict.AGAIN
    assert not {Verdict.GIVE_UP, Verdict.GUILTY} & set(verdicts[:-1])
    assert verdicts[-1] is Verdict.GIVE_UP
    assert after(SILENT, FAILED, SILENT, FAILED)[-1] is not Verdict.GIVE_UP


@pytest.mark.parametrize("failure", [DIED, SILENT, FAILED])
def test_progress_wipes_the_record(failure: dict) -> None:
    got_on = {**failure, "num_tokens": PROVEN_TOKENS}
    assert {Verdict.GIVE_UP, Verdict.GUILTY}.isdisjoint(after(*[got_on] * 20))
