"""Trace context and the decision to trace: what W3C says, and the client's own word."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import tracing_names as names
from common.config import Settings
from common.tracing import TraceContext, TraceSampler, open_sink, parse_traceparent, trace_id_of
from common.tracing_names import EventName, SpanName

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
contexts = st.builds(
    TraceContext,
    trace_id=st.integers(1, 2**128 - 1).map(lambda n: f"{n:032x}"),
    span_id=st.integers(1, 2**64 - 1).map(lambda n: f"{n:016x}"),
    parent_id=st.just(""),
    sampled=st.booleans(),
)


@given(contexts)
def test_a_context_survives_the_wire(context):
    assert parse_traceparent(context.traceparent) == context
    assert trace_id_of(context.traceparent) == context.trace_id


@given(contexts)
def test_children_and_siblings_stay_in_the_trace_under_new_ids(context):
    child = context.child()
    assert (child.trace_id, child.parent_id, child.sampled) == (context.trace_id, context.span_id, context.sampled)
    sibling = child.sibling()
    assert (sibling.trace_id, sibling.parent_id) == (child.trace_id, child.parent_id)
    assert len({context.span_id, child.span_id, sibling.span_id}) == 3
    assert len(child.span_id) == 16


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
    ],
)
def test_what_is_no_context_is_none(header):
    assert parse_traceparent(header) is None
    assert trace_id_of(header) == ""


def test_a_later_versions_further_fields_and_flags_do_not_matter():
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-03-what-ever") == TraceContext(TRACE, SPAN, "", sampled=True)
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-02") == TraceContext(TRACE, SPAN, "", sampled=False)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_clients_decision_stands_whatever_the_ratio(ratio):
    sampler = TraceSampler(exporting=True, sample_ratio=ratio)
    traced = sampler.start(f"00-{TRACE}-{SPAN}-01")
    assert traced is not None
    assert (traced.trace_id, traced.parent_id, traced.sampled) == (TRACE, SPAN, True)
    assert traced.span_id != SPAN
    assert sampler.start(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN, "", sampled=False)


def test_without_a_decision_the_ratio_decides():
    roots = [TraceSampler(exporting=True, sample_ratio=1.0).start("") for _ in range(50)]
    assert all(root is not None and root.sampled and root.parent_id == "" for root in roots)
    assert len({root.trace_id for root in roots if root is not None}) == 50
    assert {TraceSampler(exporting=True, sample_ratio=0.0).start(header) for header in ["", "broken"]} == {None}
    some = TraceSampler(exporting=True, sample_ratio=0.5)
    assert 100 < sum(some.start("") is not None for _ in range(1000)) < 900


def test_a_router_that_exports_nothing_passes_the_clients_context_on_as_it_is():
    sampler = TraceSampler(exporting=False, sample_ratio=1.0)
    assert sampler.start("") is None
    passed_on = sampler.start(f"00-{TRACE}-{SPAN}-01")
    assert passed_on is not None
    assert passed_on.traceparent == f"00-{TRACE}-{SPAN}-01"


def test_the_reference_page_has_every_name():
    page = (Path(__file__).parents[2] / "docs" / "TRACING.md").read_text(encoding="utf-8")
    constants = [value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)]
    for name in [*SpanName, *EventName, *constants]:
        assert name in page, name
    for setting in ("otlp_endpoint", "trace_sample_ratio", "timeline_entries"):
        assert setting in page
        assert setting in Settings.model_fields


def test_an_empty_endpoint_opens_nothing():
    assert open_sink(Settings(), "router", "r") is None
