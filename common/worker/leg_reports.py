"""What a worker says of legs that have ended: a log line for each that failed, spans for each that is traced.

    prefill worker   queue ─ prefill (an event a chunk) ─ transfer, as sender
    decode worker    queue ─ transfer, as receiver ─ decode
                     queue ─ prefill ─ decode                 where no prefill worker is involved

All are children of the router's root span. The last of them tells how the leg ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from common import tracing_names as names
from common.engine.messages import EndedLeg
from common.engine.sequence import SequenceStatus
from common.errors import BatonError
from common.registry import Role
from common.telemetry import get_logger
from common.tracing import AttributeValue, Span, SpanEvent, SpanKind, SpanSink, parse_traceparent, trace_id_of
from common.tracing_names import EventName, SpanName

_log = get_logger(__name__)


class LegReporter:
    """sink: None where tracing is off. Told of ended legs on the event loop."""

    def __init__(self, role: Role, worker_id: str, sink: SpanSink | None) -> None:
        self._role = role
        self._worker_id = worker_id
        self._sink = sink

    def on_ended(self, legs: Iterable[EndedLeg]) -> None:
        for leg in legs:
            if leg.error is not None:
                log_failed_leg(leg, leg.error)
            if self._sink is not None and leg.traceparent:
                self._sink.export(leg_spans(leg, self._role, self._worker_id))


def log_failed_leg(leg: EndedLeg, error: BatonError) -> None:
    """One line. The router writes another, if the request as a whole comes to a bad end."""
    log = _log.warning if error.row.is_fault else _log.info
    trace_id = trace_id_of(leg.traceparent)
    log(
        "leg failed",
        request_id=leg.request_id,
        transfer_id=leg.transfer_id,
        **({"trace_id": trace_id} if trace_id else {}),
        kind=str(error.kind),
        message=error.message,
        phase=str(leg.phase),
        tokens=leg.num_tokens,
        output_tokens=leg.num_output_tokens,
        elapsed_s=round(leg.ended_at - leg.arrived_at, 4),
    )


def leg_spans(leg: EndedLeg, role: Role, worker_id: str) -> list[Span]:
    """In order of time; empty where the trace is not sampled."""
    context = parse_traceparent(leg.traceparent)
    if context is None or not context.sampled:
        return []
    common: dict[str, AttributeValue] = {
        names.REQUEST_ID: leg.request_id,
        names.TRANSFER_ID: leg.transfer_id,
        names.WORKER_ID: worker_id,
    }
    spans = [
        Span(
            name=part.name,
            context=context.child(),
            start=part.start,
            end=max(part.start, part.end),
            attributes={**common, **part.attributes},
            kind=part.kind,
            events=_chunk_events(leg) if part.name is SpanName.PREFILL else (),
        )
        for part in _parts(leg, role)
    ]
    spans[-1] = _with_end(spans[-1], leg)
    return spans


@dataclass(frozen=True, slots=True)
class _Part:
    name: SpanName
    start: float
    end: float
    attributes: dict[str, AttributeValue]
    kind: SpanKind = "internal"


def _parts(leg: EndedLeg, role: Role) -> Iterator[_Part]:
    started = leg.ended_at if leg.started_at is None else leg.started_at
    yield _Part(SpanName.QUEUE, leg.arrived_at, started, {names.NUM_TOKENS: leg.num_tokens})
    if leg.started_at is None:
        return
    moved = leg.transferred_at is not None
    if role == "prefill" or not (moved or leg.phase == SequenceStatus.RECEIVING):
        end = leg.ended_at if leg.first_token_at is None else leg.first_token_at
        yield _Part(SpanName.PREFILL, started, end, {names.NUM_CACHED_TOKENS: leg.num_cached_tokens})
    if leg.transferred_at is not None:
        yield _transfer(leg, role, leg.transferred_at - leg.transfer_s, leg.transferred_at)
    elif leg.phase in (SequenceStatus.SENDING, SequenceStatus.RECEIVING):
        # It failed or was given up: nobody says when its first piece went, only when it could.
        yield _transfer(leg, role, started, leg.ended_at)
    if leg.decode_started_at is not None:
        tokens: dict[str, AttributeValue] = {names.NUM_OUTPUT_TOKENS: leg.num_output_tokens}
        yield _Part(SpanName.DECODE, leg.decode_started_at, leg.ended_at, tokens)


def _transfer(leg: EndedLeg, role: Role, start: float, end: float) -> _Part:
    side = "sender" if role == "prefill" else "receiver"
    attributes: dict[str, AttributeValue] = {names.TRANSFER_SIDE: side, names.TRANSFER_BYTES: leg.transfer_bytes}
    return _Part(SpanName.TRANSFER, start, end, attributes, "client" if role == "prefill" else "server")


def _chunk_events(leg: EndedLeg) -> list[SpanEvent]:
    return [SpanEvent(EventName.CHUNK, at, {names.NUM_COMPUTED_TOKENS: tokens}) for at, tokens in leg.chunks]


def _with_end(span: Span, leg: EndedLeg) -> Span:
    if leg.error is not None:
        kind = str(leg.error.kind)
        attributes = {**span.attributes, names.PHASE: str(leg.phase), names.OUTCOME: kind, names.ERROR_TYPE: kind}
        return replace(span, attributes=attributes, error=leg.error.message if leg.error.row.is_fault else None)
    return replace(span, attributes={**span.attributes, names.OUTCOME: "abort"}) if leg.aborted else span
