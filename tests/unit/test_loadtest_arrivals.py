"""Arrival schedules have the statistics they are named for, and the same seed gives the same schedule."""

import itertools
import statistics

import pytest

from loadtest.arrivals import Arrival
from loadtest.errors import BenchError
from loadtest.streams import make_arrival, parse_stream


def gaps(arrival, seed="s", count=20_000):
    times = list(itertools.islice(arrival.offsets(seed), count))
    assert times == sorted(times)
    return [b - a for a, b in itertools.pairwise([0.0, *times])]


def variation(values):
    return statistics.stdev(values) / statistics.mean(values)


@pytest.mark.parametrize("rate", [0.5, 7.0, 400.0])
def test_poisson_gaps_have_the_mean_of_the_rate_and_variation_one(rate):
    found = gaps(Arrival("poisson", rate=rate))
    assert statistics.mean(found) == pytest.approx(1 / rate, rel=0.03)
    assert variation(found) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("shape", [0.1, 0.5, 1.0, 4.0])
def test_gamma_gaps_keep_the_rate_and_vary_by_one_over_root_shape(shape):
    found = gaps(Arrival("gamma", rate=5.0, shape=shape))
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.06)
    assert variation(found) == pytest.approx(shape**-0.5, rel=0.08)


def test_poisson_counts_in_a_window_vary_as_their_mean():
    times = itertools.takewhile(lambda t: t < 4000, Arrival("poisson", rate=3.0).offsets("x"))
    counts = [0] * 4000
    for time in times:
        counts[int(time)] += 1
    assert statistics.variance(counts) / statistics.mean(counts) == pytest.approx(1.0, rel=0.1)


def test_constant_arrivals_do_not_drift():
    times = list(itertools.islice(Arrival("constant", rate=3.0).offsets("s"), 3001))
    assert times[3000] == 1000.0


def test_a_seed_fixes_the_schedule_and_another_changes_it():
    arrival = Arrival("poisson", rate=2.0)
    assert gaps(arrival, "a", 50) == gaps(arrival, "a", 50)
    assert gaps(arrival, "a", 50) != gaps(arrival, "b", 50)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"rate": 2.0}, "poisson"),
        ({"concurrency": 4}, "closed"),
        ({"replays_trace": True}, "trace"),
        ({"rate": 2.0, "replays_trace": True}, "poisson"),
        ({"kind": "gamma", "rate": 1.0}, "gamma"),
    ],
)
def test_the_numbers_given_choose_the_arrival_process(given, kind):
    defaults = {"kind": None, "rate": None, "shape": 1.0, "speed": 1.0, "concurrency": None, "replays_trace": False}
    merged = defaults | given
    assert make_arrival(merged.pop("kind"), **merged).kind == kind


@pytest.mark.parametrize(
    "text",
    [
        "name=a",
        "rate=1",
        "name=a rate=0",
        "name=a rate=1 concurrency=2",
        "name=a concurrency=0",
        "name=a rate=x",
        "name=a rate=1 color=red",
        "name=a rate=1 weight=0",
        "name=a rate=1 workload=nothing",
        "name=a arrival=trace workload=fixed",
        'name="a',
        "name=a arrival=gamma rate=1 shape=0",
    ],
)
def test_a_stream_that_makes_no_sense_is_refused_in_one_line(text):
    with pytest.raises(BenchError) as caught:
        parse_stream(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > 15


def test_a_stream_says_everything_about_one_tenant():
    text = "name=gold key=sk-1 class=fast priority=-1 salt=s weight=2 rate=3 workload=fixed:input=9,output=2"
    stream = parse_stream(text)
    assert (stream.name, stream.api_key, stream.class_name, stream.priority) == ("gold", "sk-1", "fast", "-1")
    assert (stream.cache_salt, stream.weight, stream.arrival.rate) == ("s", 2.0, 3.0)
    assert (stream.workload.input, stream.workload.output) == (9, 2)
    assert "sk-1" not in str(stream.describe())
    assert stream.at_rate(9.0).arrival.rate == 9.0
