"""A short run of the chaos suite; `python -m tests.fault.chaos --minutes 30` is the long one."""

from __future__ import annotations

from tests.fault import chaos


def test_whatever_breaks_every_request_is_accounted_for_and_everything_given_back():
    report, wrong = chaos.run(seconds=45, seed=3)
    print(report)
    assert wrong == [], report
