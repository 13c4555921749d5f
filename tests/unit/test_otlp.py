"""Spans on their way out: none is invented, none delays a request, a dead collector costs one log line."""

from __future__ import annotations

import logging
import logging.handlers
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Queue

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common import otlp
from common.otlp import CAPACITY, OtlpSink, describe_service
from common.tracing import Span, SpanEvent, TraceContext

SERVICE = describe_service("router", "r1", "test")
ROOT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "", sampled=True)


class FakeExporter(SpanExporter):
    """Each export waits for a result to be put into `results`, then takes its batch."""

    def __init__(self) -> None:
        self.results: Queue[SpanExportResult | Exception] = Queue()
        self.batches: Queue[Sequence[ReadableSpan]] = Queue()
        self.entered = threading.Semaphore(0)
        self.closed = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.release()
        result = self.results.get(timeout=20)
        self.batches.put(spans)
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def no_lingering(monkeypatch):
    monkeypatch.setattr(otlp, "LINGER_S", 0.0)


@pytest.fixture
def exporter() -> FakeExporter:
    return FakeExporter()


@pytest.fixture
def sink(exporter) -> Iterator[OtlpSink]:
    sink = OtlpSink("http://127.0.0.1:1", SERVICE, exporter=exporter)
    yield sink
    for _ in range(20):
        exporter.results.put(SpanExportResult.SUCCESS)
    sink.close(20)


def span(name: str = "s", context: TraceContext = ROOT, **fields) -> Span:
    return Span(**{"name": name, "context": context, "start": 1.0, "end": 2.0, "attributes": {}, **fields})


def test_ids_parents_times_status_and_events_reach_the_exporter(sink, exporter):
    now = time.monotonic()
    events = (SpanEvent("chunk", now - 1.0, {"n": 3}),)
    sink.export(
        [
            span("root", kind="server", start=now - 2.0, end=now, attributes={"a": ("b",)}),
            span("part", ROOT.child(), start=now - 1.5, end=now - 0.5, error="it broke", events=events),
        ]
    )
    exporter.results.put(SpanExportResult.SUCCESS)
    root, part = exporter.batches.get(timeout=20)
    assert f"{root.context.trace_id:032x}" == f"{part.context.trace_id:032x}" == ROOT.trace_id
    assert f"{root.context.span_id:016x}" == ROOT.span_id
    assert root.parent is None
    assert part.parent is not None
    assert part.parent.span_id == root.context.span_id
    assert (root.kind.name, part.kind.name) == ("SERVER", "INTERNAL")
    assert root.status.is_unset
    assert (part.status.status_code.name, part.status.description) == ("ERROR", "it broke")
    assert root.attributes == {"a": ("b",)}
    assert root.resource.attributes["service.name"] == "baton-router"
    assert root.end_time is not None
    assert root.start_time is not None
    assert root.end_time - root.start_time == pytest.approx(2e9, abs=1000)
    assert abs(root.end_time - time.time_ns()) < 60e9, "not the wall clock's time"
    assert part.events[0].timestamp - root.start_time == pytest.approx(1e9, abs=1000)


def test_a_full_queue_drops_what_comes_next_and_counts_it(sink, exporter):
    sink.export([span()])
    assert exporter.entered.acquire(timeout=20)  # the thread is busy with the first one from here on
    sink.export([span()] * CAPACITY)
    assert sink.num_dropped == 0
    sink.export([span()] * 3)
    assert sink.num_dropped == 3


def test_a_failing_collector_is_told_once_and_so_is_its_return(sink, exporter):
    with structlog.testing.capture_logs() as lines:
        for result in (SpanExportResult.FAILURE, RuntimeError("no"), SpanExportResult.FAILURE):
            sink.export([span()])
            exporter.results.put(result)
            exporter.batches.get(timeout=20)
        sink.export([span()])
        exporter.results.put(SpanExportResult.SUCCESS)
        exporter.batches.get(timeout=20)
        sink.close(20)
    assert [(line["log_level"], line["event"]) for line in lines] == [
        ("warning", "traces can't be exported: going on without"),
        ("info", "traces are exported again"),
    ]
    assert lines[0]["endpoint"] == "http://127.0.0.1:1"
    assert lines[1]["spans_lost"] == sink.num_dropped == 3


def test_the_librarys_own_complaints_become_our_reason_and_no_line_of_their_own(sink, exporter, monkeypatch):
    library = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    on_root = Queue()
    handler = logging.handlers.QueueHandler(on_root)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with structlog.testing.capture_logs() as lines:
        sink.export([span()])
        assert exporter.entered.acquire(timeout=20)
        library.error("Failed to export traces\nto %s", "there")
        exporter.results.put(SpanExportResult.FAILURE)
        exporter.batches.get(timeout=20)
        sink.close(20)
    assert lines[0]["reason"] == "Failed to export traces to there"
    assert on_root.empty()
    library.error("with no sink left, it speaks for itself")
    assert on_root.qsize() == 1


def test_closing_sends_what_is_left(sink, exporter):
    sink.export([span("a")])
    sink.export([span("b")])
    for _ in range(2):
        exporter.results.put(SpanExportResult.SUCCESS)
    sink.close(20)
    assert exporter.closed.is_set()
    sent = [s.name for _ in range(exporter.batches.qsize()) for s in exporter.batches.get()]
    assert sent == ["a", "b"]
    sink.export([span("late")])
    assert sink.num_dropped == 1


def test_closing_does_not_wait_for_a_collector_that_hangs(sink, exporter):
    sink.export([span()])
    assert exporter.entered.acquire(timeout=20)
    sink.close(0.01)  # would hang here
    assert exporter.closed.is_set()


def test_a_collector_that_is_not_there_harms_nobody():
    sink = OtlpSink("http://127.0.0.1:1", SERVICE)
    sink.export([span()])
    sink.close(0.0)
    sink.close(0.0)
    sink.export([span()])
    assert sink.num_dropped >= 1
