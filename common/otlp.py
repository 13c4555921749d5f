"""Spans on their way out: a bounded queue, one thread that empties it, OpenTelemetry's own OTLP exporter behind it.

    event loop ── export ──► queue (≤ CAPACITY) ──► thread: batch, convert, send ──► collector
                               full: dropped, counted

Imported only where tracing is on. A collector that is slow, down or wrong costs spans and one log line, nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from common import tracing_names as names
from common.telemetry import get_logger
from common.tracing import Span

# Spans that wait for the exporter, of some 1,500 requests at a router: about 8 MB.
CAPACITY: Final = 8192
BATCH_SPANS: Final = 512
# A span waits at most this long for others to travel with.
LINGER_S: Final = 1.0
# For one batch, the library's own repetitions included.
SEND_TIMEOUT_S: Final = 5.0
# Says each failed try; we say once that it fails, and why.
_LIBRARY_LOGGER: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_KINDS: Final = {kind.name.lower(): kind for kind in SpanKind}
_OK: Final = Status(StatusCode.UNSET)

_log = get_logger(__name__)


def describe_service(role: str, instance_id: str, cluster: str) -> Mapping[str, str]:
    """Who exports: the resource attributes of all spans of this process."""
    return {
        names.SERVICE_NAMESPACE: "baton",
        names.SERVICE_NAME: f"baton-{role}",
        names.SERVICE_INSTANCE_ID: instance_id,
        names.SERVICE_VERSION: version("baton"),
        names.CLUSTER: cluster,
    }


class OtlpSink:
    """A SpanSink that sends to an OTLP/gRPC collector.

    endpoint: http://HOST:PORT, or https:// for TLS; headers, compression and certificates as OTEL_EXPORTER_OTLP_* in
    the environment say. service: attributes of the resource. exporter: in tests.
    """

    def __init__(self, endpoint: str, service: Mapping[str, str], *, exporter: SpanExporter | None = None) -> None:
        self._endpoint = endpoint
        self._resource = Resource.create(service)
        self._scope = InstrumentationScope("baton", service.get(names.SERVICE_VERSION))
        self._last_words = _LastWords()
        self._exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
        # Items are what one call of `export` brought, with the wall clock's lead over the monotonic one at that moment.
        self._queue: SimpleQueue[tuple[int, Sequence[Span]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued = 0
        self._num_dropped = 0
        self._failing = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that never reached the collector, from the start."""
        return self._num_dropped

    def export(self, spans: Sequence[Span]) -> None:
        with self._lock:
            if self._closed or self._num_queued + len(spans) > CAPACITY:
                self._num_dropped += len(spans)
                return
            self._num_queued += len(spans)
        self._queue.put((time.time_ns() - time.monotonic_ns(), spans))

    def close(self, timeout_s: float) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        # Ends the exporter's waiting between two tries, and with it the thread, which is no one's concern any more.
        self._exporter.shutdown()
        self._last_words.detach()

    # The thread.

    def _run(self) -> None:
        while True:
            batch, more = self._take_batch()
            if batch:
                self._send(batch)
            if not more:
                return

    def _take_batch(self) -> tuple[list[ReadableSpan], bool]:
        """Waits for spans, then LINGER_S for others. False: the sink is closed and nothing follows."""
        batch: list[ReadableSpan] = []
        item = self._queue.get()
        send_at = time.monotonic() + LINGER_S
        while item is not None:
            lead_ns, spans = item
            batch += [self._convert(span, lead_ns) for span in spans]
            with self._lock:
                self._num_queued -= len(spans)
            if len(batch) >= BATCH_SPANS:
                return batch, True
            try:
                item = self._queue.get(timeout=max(0.0, send_at - time.monotonic()))
            except Empty:
                return batch, True
        return batch, False

    def _send(self, batch: list[ReadableSpan]) -> None:
        try:
            failed = self._exporter.export(batch) is not SpanExportResult.SUCCESS
            reason = self._last_words.text
        except Exception as error:
            failed, reason = True, repr(error)
        if failed:
            with self._lock:
                self._num_dropped += len(batch)
        if failed and not self._failing and not self._closed:
            _log.warning("traces can't be exported: going on without", endpoint=self._endpoint, reason=reason)
        elif self._failing and not failed:
            _log.info("traces are exported again", endpoint=self._endpoint, spans_lost=self._num_dropped)
        self._failing = failed

    def _convert(self, span: Span, lead_ns: int) -> ReadableSpan:
        """The SDK's own record, made directly: its tracer would have to be asked while the request runs."""

        def wall(at: float) -> int:
            return round(at * 1e9) + lead_ns

        context = span.context
        return ReadableSpan(
            name=span.name,
            context=_span_context(context.trace_id, context.span_id, is_remote=False),
            parent=_span_context(context.trace_id, context.parent_id, is_remote=True) if context.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, wall(event.at)) for event in span.events],
            kind=_KINDS[span.kind],
            status=_OK if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=wall(span.start),
            end_time=wall(span.end),
            instrumentation_scope=self._scope,
        )


def _span_context(trace_id: str, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))


class _LastWords(logging.Handler):
    """Takes the exporter's complaints, which would be a log line for each try, and keeps the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.text = "no reason given"
        self._logger = logging.getLogger(_LIBRARY_LOGGER)
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = not any(isinstance(handler, _LastWords) for handler in self._logger.handlers)
