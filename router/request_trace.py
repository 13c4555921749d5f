"""The router's share of a request's trace: the root span and what the router itself did. Workers add their own spans.

chat tiny                        router, server span; gen_ai.* attributes
├─ admit, queue, place, reserve  router
├─ queue, prefill, transfer      prefill worker
├─ queue, transfer, decode       decode worker
└─ migrate                       router, where a worker failed; place, reserve … of the next attempt follow
"""

from __future__ import annotations

from typing import Final

from common import tracing_names as names
from common.tracing import AttributeValue, Span, SpanKind, SpanSink, TraceContext
from common.tracing_names import SpanName
from router.request_record import Failure, Refusal, RequestRecord
from router.spec import Operation
from router.timeline import Phase, failure_of, phases_of

# What the router knows of the others, the workers know better.
_ROUTERS_OWN: Final = frozenset({SpanName.ADMIT, SpanName.QUEUE, SpanName.PLACE, SpanName.RESERVE, SpanName.MIGRATE})


class RequestTracer:
    """Exports the spans of ended requests. model, address, port: what clients asked, and where; port 0: unsaid."""

    def __init__(self, sink: SpanSink, model: str, address: str, port: int) -> None:
        self._sink = sink
        self._model = model
        self._server: dict[str, AttributeValue] = {names.SERVER_ADDRESS: address}
        if port:
            self._server[names.SERVER_PORT] = port

    def on_end(self, record: RequestRecord) -> None:
        if record.trace is not None and record.trace.sampled:
            parts = [_part_span(phase, record, record.trace) for phase in phases_of(record) if _is_own(phase)]
            self._sink.export([self._root_span(record, record.trace), *parts])

    def on_refused(self, refusal: Refusal) -> None:
        if refusal.trace is None or not refusal.trace.sampled:
            return
        admit = Span(SpanName.ADMIT, refusal.trace.child(), refusal.received_at, refusal.refused_at, {})
        root = Span(
            name=f"{refusal.operation} {self._model}",
            context=refusal.trace,
            start=refusal.received_at,
            end=refusal.refused_at,
            attributes={
                **self._common(refusal.operation),
                names.REQUEST_ID: refusal.request_id,
                names.OUTCOME: refusal.failure.kind,
                names.ERROR_TYPE: refusal.failure.kind,
            },
            kind="server",
            error=_status(refusal.failure),
        )
        self._sink.export([root, admit])

    def _root_span(self, record: RequestRecord, trace: TraceContext) -> Span:
        usage, failure, sampling = record.usage, record.failure, record.sampling
        attributes: dict[str, AttributeValue] = {
            **self._common(record.operation),
            names.RESPONSE_MODEL: self._model,
            names.REQUEST_MAX_TOKENS: sampling.max_tokens,
            names.REQUEST_TEMPERATURE: sampling.temperature,
            names.REQUEST_TOP_P: sampling.top_p,
            names.USAGE_INPUT_TOKENS: usage.prompt_tokens,
            names.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
            names.USAGE_CACHE_READ_INPUT_TOKENS: usage.cached_tokens,
            names.REQUEST_ID: record.request_id,
            names.OUTCOME: record.outcome,
            names.ATTEMPTS: len(record.attempts),
        }
        if sampling.top_k:
            attributes[names.REQUEST_TOP_K] = sampling.top_k
        if record.first_token_at is not None:
            attributes[names.RESPONSE_TIME_TO_FIRST_CHUNK] = record.first_token_at - record.received_at
        if failure is None:
            attributes[names.RESPONSE_FINISH_REASONS] = (record.outcome,)
        else:
            attributes[names.ERROR_TYPE] = failure.kind
            attributes[names.PHASE] = record.phase
        return Span(
            name=f"{record.operation} {self._model}",
            context=trace,
            start=record.received_at,
            end=record.ended_at,
            attributes=attributes,
            kind="server",
            error=None if failure is None else _status(failure),
        )

    def _common(self, operation: Operation) -> dict[str, AttributeValue]:
        return {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: "baton",
            names.REQUEST_MODEL: self._model,
            **self._server,
        }


def _is_own(phase: Phase) -> bool:
    return phase.name in _ROUTERS_OWN and (phase.name is not SpanName.QUEUE or not phase.worker_id)


def _part_span(phase: Phase, record: RequestRecord, trace: TraceContext) -> Span:
    attributes: dict[str, AttributeValue] = {names.REQUEST_ID: record.request_id, names.ATTEMPT: phase.attempt}
    attempt, failure = record.attempts[phase.attempt - 1], failure_of(phase, record)
    if phase.name is SpanName.RESERVE:
        attributes |= {names.WORKER_ID: attempt.decode_id, names.TRANSFER_ID: attempt.transfer_id}
    elif phase.name is SpanName.PLACE and attempt.decode_id:
        attributes[names.PLACED_WORKERS] = attempt.worker_ids
    elif phase.name is SpanName.MIGRATE:
        failed = record.attempts[phase.attempt - 2]
        attributes |= {names.FAILED_WORKERS: failed.blamed_ids, names.NUM_OUTPUT_TOKENS: attempt.first_index}
        if failed.failure is not None:
            attributes |= {names.ERROR_TYPE: failed.failure.kind, names.ERROR_MESSAGE: failed.failure.message}
    error: str | None = None
    if failure is not None:
        attributes[names.ERROR_TYPE], error = failure.kind, _status(failure)
    end = record.ended_at if phase.end is None else phase.end
    kind: SpanKind = "client" if phase.name is SpanName.RESERVE else "internal"
    return Span(phase.name, trace.child(), phase.start, end, attributes, kind, error)


def _status(failure: Failure) -> str | None:
    """Of a server's span: what the client did wrong, or gave up, is no error of ours."""
    return failure.message if failure.is_fault else None
