"""Percentiles are exact, goodput counts what it says, fairness is Jain's."""

import itertools
import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.errors import BenchError
from loadtest.record import Failure, RequestRecord
from loadtest.report.groups import fairness_report, group_report, latency_samples
from loadtest.report.peak import gaps_at_peak
from loadtest.slo import Slo, met_fraction, parse_slo
from loadtest.stats import PERCENTILES, curve, jain_index, summarize
from loadtest.streams import parse_stream

finite = st.floats(min_value=0, max_value=1e6, allow_nan=False)


def record(intended=0.0, first=0.1, itl=0.01, tokens=5, end=None, failure=None, stream=0, prompt=10, cached=None):
    events = array("d", [intended + first + i * itl for i in range(tokens)])
    made = RequestRecord(
        index=0, stream=stream, turn=0, intended_s=intended, requested_tokens=tokens, sent_s=intended, events_s=events
    )
    made.end_s = (events[-1] if tokens else intended + first) if end is None else intended + end
    made.event_tokens = tokens
    made.usage_output_tokens = tokens
    made.usage_prompt_tokens = prompt
    made.usage_cached_tokens = cached
    made.finish_reason = "length"
    if failure:
        made.fail(failure, "why")
    return made


def exact_percentile(values, q):
    """Linear between order statistics, straight from the definition."""
    ordered = sorted(values)
    place = q / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@given(st.lists(finite, min_size=1, max_size=300))
def test_percentiles_are_those_of_the_definition(values):
    summary = summarize(np.array(values))
    for name, q in PERCENTILES:
        assert summary[name] == pytest.approx(exact_percentile(values, q), rel=1e-9, abs=1e-9)
    assert summary["max"] == max(values)
    assert summary["count"] == len(values)


def test_no_sample_gives_no_figure():
    assert summarize(np.array([])) == {"count": 0, "mean": None, **{n: None for n, _ in PERCENTILES}, "max": None}
    assert curve(np.array([])) == []


@given(st.lists(finite, min_size=1, max_size=200))
def test_curves_rise_from_the_least_to_the_greatest_sample(values):
    points = curve(np.array(values))
    assert points[0][0] == pytest.approx(min(values))
    assert points[-1] == [pytest.approx(max(values)), 1.0]
    assert all(a[0] <= b[0] * (1 + 1e-12) + 1e-9 and a[1] < b[1] for a, b in itertools.pairwise(points))


def test_jain_is_one_for_equal_and_one_in_n_for_a_single_winner():
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 2.0]) == pytest.approx(9 / 10)
    assert jain_index([0.0, 0.0]) is None


@given(st.lists(st.floats(min_value=0.001, max_value=1e3), min_size=1, max_size=20), st.floats(0.001, 1e3))
def test_jain_does_not_depend_on_the_unit(shares, scale):
    assert jain_index([s * scale for s in shares]) == pytest.approx(jain_index(shares))
    assert 1 / len(shares) - 1e-9 <= jain_index(shares) <= 1 + 1e-9


def test_latencies_run_from_the_intended_send_time():
    late = record(intended=10.0, first=0.5)
    late.sent_s = 10.3
    samples = latency_samples([late])
    assert samples.ttft[0] == pytest.approx(0.5)
    assert samples.ttft_from_send[0] == pytest.approx(0.2)
    assert samples.send_lag[0] == pytest.approx(0.3)
    assert samples.e2e[0] == pytest.approx(0.54)


def test_tpot_uses_tokens_and_itl_uses_events():
    made = record(first=0.1, itl=0.03, tokens=5)
    # Each event carried two tokens.
    made.usage_output_tokens = 10
    samples = latency_samples([made])
    assert samples.itl == pytest.approx([0.03] * 4)
    assert samples.tpot == pytest.approx([0.12 / 9])


def test_failed_requests_give_no_latency_and_count_against_goodput():
    records = [record(), record(failure=Failure.TIMEOUT), record(tokens=0, failure=Failure.HTTP_STATUS)]
    records[2].failure_code = "429"
    report = group_report(records, latency_samples(records), span_s=2.0, slo=Slo(ttft_ms=1000))
    assert report["requests"] == {"sent": 3, "ok": 1, "failed": 2, "cancelled": 0}
    assert report["errors"] == {"timeout": 1, "http_429": 1}
    assert report["latency_ms"]["ttft"]["count"] == 1
    assert report["goodput"]["fraction"] == pytest.approx(1 / 3)
    assert report["goodput"]["requests_per_s"] == pytest.approx(0.5)
    assert report["throughput"]["output_tokens_per_s"] == pytest.approx(2.5)


def test_requests_that_we_gave_up_are_neither_good_nor_failed():
    records = [record(), record(failure=Failure.CANCELLED)]
    report = group_report(records, latency_samples(records), span_s=1.0, slo=Slo(ttft_ms=1000))
    assert report["requests"] == {"sent": 2, "ok": 1, "failed": 0, "cancelled": 1}
    assert report["goodput"]["fraction"] == 1.0


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft_ms=100.1), True),
        (Slo(ttft_ms=99.9), False),
        (Slo(tpot_ms=10.1), True),
        (Slo(tpot_ms=9.9), False),
        (Slo(itl_ms=10.1), True),
        (Slo(itl_ms=9.9), False),
        (Slo(itl_max_ms=9.9), False),
        (Slo(e2e_ms=140.1), True),
        (Slo(e2e_ms=139.9), False),
        (Slo(ttft_ms=100.1, e2e_ms=139.9), False),
    ],
)
def test_each_limit_is_met_up_to_its_value(slo, met):
    assert slo.is_met(record(first=0.1, itl=0.01, tokens=5)) is met


def test_the_itl_limit_bears_a_rare_stall_and_the_maximum_does_not():
    made = record(tokens=100)
    made.events_s = array("d", [*made.events_s[:50], *[t + 0.5 for t in made.events_s[50:]]])
    made.end_s = made.events_s[-1]
    assert Slo(itl_ms=11).is_met(made)
    assert not Slo(itl_max_ms=400).is_met(made)


def test_one_token_answers_have_no_gap_to_judge():
    assert Slo(itl_ms=1, tpot_ms=1, itl_max_ms=1).is_met(record(tokens=1))


def test_the_fraction_is_of_all_requests():
    records = [record(first=0.1), record(first=0.3), record(failure=Failure.DISCONNECT), record(first=0.2)]
    assert met_fraction(Slo(ttft_ms=250), records) == 0.5
    assert met_fraction(Slo(ttft_ms=250), []) == 0.0


def test_slo_text_is_read_and_nonsense_refused():
    assert parse_slo("ttft_ms=200, itl_ms=50.5") == Slo(ttft_ms=200, itl_ms=50.5)
    for text in ("", "ttft=200", "ttft_ms", "ttft_ms=fast", "ttft_ms=0", "ttft_ms=-1"):
        with pytest.raises(BenchError, match="--slo"):
            parse_slo(text)


def test_cache_hits_are_of_requests_that_tell():
    records = [record(prompt=100, cached=50), record(prompt=100, cached=0), record(prompt=900, cached=None)]
    report = group_report(records, latency_samples(records), 1.0, None)
    assert report["cache"] == {"cached_tokens": 50, "prompt_tokens": 200, "hit_ratio": 0.25}
    untold = [record(cached=None)]
    assert group_report(untold, latency_samples(untold), 1.0, None)["cache"] is None


def test_fairness_weighs_service_by_entitlement():
    streams = [parse_stream("name=a rate=1 weight=2"), parse_stream("name=b rate=1")]
    served = [[record(tokens=5, prompt=10)] * 4, [record(tokens=5, prompt=10)] * 2]
    report = fairness_report(streams, served)
    assert report["jain_service"] == pytest.approx(1.0)
    assert report["service_tokens"] == {"a": 40.0, "b": 40.0}
    starved = [served[0], [record(failure=Failure.TIMEOUT)] * 2]
    assert fairness_report(streams, starved)["jain_demand_met"] == pytest.approx(0.5)
    assert fairness_report(streams[:1], served[:1]) is None


def test_a_stream_without_tokens_or_finish_reason_is_a_failure():
    empty = record(tokens=0)
    empty.close(1.0)
    assert empty.failure is Failure.EMPTY_STREAM
    unfinished = record()
    unfinished.finish_reason = None
    unfinished.close(1.0)
    assert unfinished.failure is Failure.NO_FINISH_REASON
    # The first cause stays.
    broken = record(tokens=0, failure=Failure.DISCONNECT)
    broken.close(1.0)
    assert broken.failure_name == "disconnect"


def _stream(*events_s):
    made = RequestRecord(index=0, stream=0, turn=0, intended_s=0.0, requested_tokens=len(events_s))
    made.events_s = array("d", events_s)
    return made


def test_only_gaps_while_most_streams_decode_count_as_full_load():
    slow_start = _stream(0.0, 5.0, 6.0, 7.0, 8.0)
    late, later = _stream(4.5, 5.5, 6.5), _stream(20.0, 21.0)
    # Two at once from 4.5 to 6.5: of `slow_start` that is 5 → 6, of `late` everything, of `later` nothing.
    assert gaps_at_peak([slow_start, late, later]).tolist() == [1.0, 1.0, 1.0]
    assert gaps_at_peak([]).tolist() == []
    assert gaps_at_peak([_stream(3.0)]).tolist() == []


def test_a_stream_that_begins_as_another_ends_is_not_at_once_with_it():
    assert len(gaps_at_peak([_stream(0.0, 1.0, 2.0), _stream(2.0, 3.0, 4.0)])) == 4
