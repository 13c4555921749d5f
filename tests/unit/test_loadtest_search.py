"""The saturation search finds a known capacity, bears a noisy probe, keeps to its time, and says why it ended."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadtest.errors import BenchError
from loadtest.rate_search import LOST_CAUSE, Probe, RateSearch, SearchOptions, search
from loadtest.slo import Slo

SLO = Slo(ttft_ms=100)


class SimulatedServer:
    """Meets the objective up to `capacity` requests a second; time passes only in probes."""

    def __init__(self, capacity, *, fraction_above=0.5, first=None):
        self.capacity = capacity
        self.fraction_above = fraction_above
        self.first = list(first or ())
        self.now = 0.0
        self.options = None
        self.seeds = []
        self.cooled = 0

    async def probe(self, rate, number):
        self.seeds.append(number)
        self.now += self.options.duration_s(rate)
        if self.first:
            return self.first.pop(0)
        return Probe(rate, 1.0 if rate <= self.capacity else self.fraction_above, {})

    async def cool_down(self):
        self.cooled += 1
        self.now += self.options.cool_down_s

    async def search(self, **settings):
        self.options = SearchOptions(slo=SLO, **{"max_time_s": 1e9} | settings)
        return await search(self.options, self.probe, self.cool_down, lambda: self.now)


@settings(max_examples=60)
@example(17.0 / 2**8, 17.0, 0.02)
@example(17.0 / 2**7, 17.0, 0.02)
@given(st.floats(0.05, 900.0), st.floats(0.1, 50.0), st.sampled_from([0.02, 0.05, 0.2]))
async def test_a_known_capacity_is_found_within_the_tolerance(capacity, start, tolerance):
    server = SimulatedServer(capacity)
    outcome = await server.search(start_rate=start, tolerance=tolerance, max_rate=1000.0)
    if capacity < start / 2**8:
        assert outcome.best == 0.0
        return
    assert outcome.best <= capacity < outcome.failed
    assert outcome.failed <= outcome.best * (1 + tolerance) * 1.0001
    # Doubling and bisection, no sweep.
    assert len(outcome.probes) < 30
    assert server.seeds == list(range(len(outcome.probes)))


async def test_one_noisy_near_miss_does_not_lead_astray():
    server = SimulatedServer(20.0, first=[Probe(5.0, 0.92, {})])
    outcome = await server.search(start_rate=5.0)
    assert 19 < outcome.best <= 20


async def test_a_near_miss_that_repeats_is_a_miss():
    server = SimulatedServer(20.0, fraction_above=0.93)
    outcome = await server.search(start_rate=5.0)
    assert 19 < outcome.best <= 20


async def test_a_lost_cause_counts_as_a_miss_though_many_met_the_objective():
    server = SimulatedServer(4.0, first=[Probe(8.0, 0.99, {}, stopped=LOST_CAUSE)])
    outcome = await server.search(start_rate=8.0)
    assert 3.8 < outcome.best <= 4.0


async def test_the_highest_allowed_rate_ends_the_search():
    outcome = await SimulatedServer(1e9).search(start_rate=3.0, max_rate=10.0)
    assert (outcome.best, outcome.failed) == (10.0, math.inf)
    assert "--max-rate" in outcome.ended


async def test_a_hopeless_objective_is_said_to_be_so():
    outcome = await SimulatedServer(0.0).search(start_rate=8.0)
    assert outcome.best == 0.0
    assert "no rate" in outcome.ended
    assert [probe.rate for probe in outcome.probes] == [8.0 / 2**k for k in range(9)]


async def test_no_probe_starts_that_would_end_after_the_time_is_up():
    server = SimulatedServer(100.0)
    outcome = await server.search(start_rate=1.0, probe_s=30.0, cool_down_s=2.0, max_time_s=100.0)
    assert server.now <= 100.0 + 2.0
    assert "time is up" in outcome.ended
    assert outcome.best == 4.0


async def test_a_saturated_client_is_tried_again_and_then_ends_the_search():
    saturated = Probe(5.0, 0.2, {}, client_saturated=True)
    once = await SimulatedServer(20.0, first=[saturated]).search(start_rate=5.0)
    assert 19 < once.best <= 20
    twice = await SimulatedServer(20.0, first=[saturated, saturated]).search(start_rate=5.0)
    assert twice.best == 0.0
    assert "client saturated" in twice.ended


async def test_an_interruption_ends_the_search_with_what_was_found():
    probes = [Probe(5.0, 1.0, {}), Probe(10.0, 1.0, {}, stopped="interrupted (Ctrl-C)")]
    outcome = await SimulatedServer(20.0, first=probes).search(start_rate=5.0)
    assert (outcome.best, outcome.ended) == (5.0, "interrupted (Ctrl-C)")


def test_slow_rates_get_longer_probes():
    options = SearchOptions(slo=SLO, probe_s=30.0, min_requests=20)
    assert options.duration_s(10.0) == 30.0
    assert options.duration_s(0.5) == 40.0


@pytest.mark.parametrize(
    "bad",
    [{"fraction": 0.0}, {"fraction": 1.1}, {"start_rate": 0.0}, {"start_rate": 9.0, "max_rate": 8.0}, {"probe_s": 0.0}],
)
def test_search_options_that_make_no_sense_are_refused(bad):
    with pytest.raises(BenchError):
        SearchOptions(slo=SLO, **bad)


def test_the_bracket_only_narrows():
    state = RateSearch(1.0, 100.0)
    state.observe(4.0, passed=True)
    state.observe(2.0, passed=True)
    assert state.best == 4.0
    state.observe(9.0, passed=False)
    state.observe(20.0, passed=False)
    assert (state.failed, state.next_rate()) == (9.0, 6.0)
