"""Where a request stands in a trace, and the spans that are made of it after the fact. Nothing here is OpenTelemetry's.

    traceparent of the client ──► TraceSampler.start ──► TraceContext ──► SequenceSpec.traceparent ──► workers
    stamps that are kept anyway ──── at the end ──► Span … ──► SpanSink: a bounded queue, a thread, OTLP

No span object exists while a request runs: router and workers keep a few stamps, and spans with explicit times are
derived from these once it has ended. Without `otlp_endpoint` there is no sink, and OpenTelemetry is not even imported.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from common.config import Settings

SpanKind = Literal["internal", "server", "client", "producer", "consumer"]
AttributeValue = str | bool | int | float | Sequence[str]

# W3C Trace Context. A later version may have more fields behind these four.
_TRACEPARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids as lower-case hexadecimal: trace_id 32 digits, span_id and parent_id 16; parent_id "" for none.

    span_id: of the span that what comes next is a child of. sampled: spans of this trace are to be exported.
    """

    trace_id: str
    span_id: str
    parent_id: str
    sampled: bool

    @property
    def traceparent(self) -> str:
        """For those who are to make children of span_id."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        return TraceContext(self.trace_id, new_span_id(), self.span_id, self.sampled)

    def sibling(self) -> TraceContext:
        """Another span with the same parent, or another root of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.parent_id, self.sampled)


def parse_traceparent(header: str) -> TraceContext | None:
    """The sender's context: span_id is its span, parent_id empty. None for a header that W3C calls invalid."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if trace_id == _NO_TRACE or span_id == _NO_SPAN or (version == "00" and more):
        return None
    return TraceContext(trace_id, span_id, "", bool(int(flags, 16) & 1))


def trace_id_of(traceparent: str) -> str:
    """For logs; "" where there is none."""
    context = parse_traceparent(traceparent) if traceparent else None
    return "" if context is None else context.trace_id


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


class TraceSampler:
    """Decides at the router which requests are traced. The client's decision, where it made one, stands.

    exporting: this process has a sink. sample_ratio: of the requests that come without a decision.
    """

    def __init__(self, *, exporting: bool, sample_ratio: float) -> None:
        self._exporting = exporting
        self._sample_ratio = sample_ratio

    def start(self, traceparent: str) -> TraceContext | None:
        """The context of a request's root span. traceparent: the client's, perhaps "" or broken.

        Where nothing is exported here, the client's context is passed on as it came, for logs and for workers. None:
        there is no trace.
        """
        given = parse_traceparent(traceparent) if traceparent else None
        if not self._exporting:
            return given
        if given is not None:
            return given.child() if given.sampled else given
        if random.random() >= self._sample_ratio:
            return None
        return TraceContext(f"{random.getrandbits(128) or 1:032x}", new_span_id(), "", sampled=True)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """at: monotonic seconds of this process."""

    name: str
    at: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request that is over. start, end: monotonic seconds of this process.

    error: what went wrong, as the span's error status; None: nothing did.
    """

    name: str
    context: TraceContext
    start: float
    end: float
    attributes: Mapping[str, AttributeValue]
    kind: SpanKind = "internal"
    error: str | None = None
    events: Sequence[SpanEvent] = ()


class SpanSink(Protocol):
    """Where spans go. See common/otlp.py."""

    def export(self, spans: Sequence[Span]) -> None:
        """Any thread. Returns at once and never raises: what can't be kept is dropped and counted."""

    def close(self, timeout_s: float) -> None:
        """Send what is left, for at most about timeout_s; blocks. Idempotent."""


def open_sink(settings: Settings, role: str, instance_id: str) -> SpanSink | None:
    """What `otlp_endpoint` asks for; None where it is empty. Whoever calls closes it."""
    if not settings.otlp_endpoint:
        return None
    from common.otlp import OtlpSink, describe_service

    return OtlpSink(settings.otlp_endpoint, describe_service(role, instance_id, settings.cluster))
