"""Who waits is served by class, then by arrival, and is passed over a bounded number of times."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sequence import Sequence
from common.engine.waiting_queue import MAX_OVERTAKEN, WaitingQueue
from tests.unit.engine_fakes import make_spec


def make_sequence(arrival: int, priority: int) -> Sequence:
    return Sequence(make_spec(str(arrival), [1], priority=priority), 1, arrival, 0.0, 4)


def test_urgent_ones_go_first_and_within_a_class_the_earliest():
    queue: WaitingQueue[Sequence] = WaitingQueue()
    for arrival, priority in enumerate([0, 5, -2, 0, -2]):
        queue.push(make_sequence(arrival, priority))
    assert [queue.pop().arrival for _ in range(5)] == [2, 4, 0, 3, 1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), min_size=1, max_size=300))
def test_nobody_is_passed_over_more_often_than_the_bound(trace):
    """Each step brings one sequence and serves some; whoever waits is served before MAX_OVERTAKEN later ones, and those
    that starved with it."""
    queue: WaitingQueue[Sequence] = WaitingQueue()
    passed: dict[int, int] = {}
    for arrival, (priority, served) in enumerate(trace):
        queue.push(make_sequence(arrival, priority))
        for _ in range(min(served, len(queue))):
            head = queue.pop()
            for other in queue:
                if other.arrival < head.arrival:
                    passed[other.arrival] = passed.get(other.arrival, 0) + 1
    assert all(n <= MAX_OVERTAKEN for n in passed.values())


def test_a_starved_one_goes_before_the_most_urgent():
    queue: WaitingQueue[Sequence] = WaitingQueue()
    queue.push(make_sequence(0, priority=9))
    for arrival in range(1, MAX_OVERTAKEN + 1):
        queue.push(make_sequence(arrival, priority=0))
        assert queue.pop().arrival == arrival
    queue.push(make_sequence(999, priority=-9))
    assert queue.pop().arrival == 0
