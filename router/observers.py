"""Everybody who is told how requests fare: metrics, timeline, log, traces. None of them can harm a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.errors import ErrorKind
from common.telemetry import get_logger
from router.metrics import RouterMetrics
from router.request_log import RequestLog
from router.request_record import Refusal, RequestRecord
from router.request_trace import RequestTracer
from router.timeline import Timeline

_log = get_logger(__name__)


class EndObserver(Protocol):
    def on_end(self, record: RequestRecord) -> None: ...


class Observers:
    """The dispatcher's and the gateway's one observer. tracer: None where tracing is off."""

    def __init__(
        self, metrics: RouterMetrics, timeline: Timeline, tracer: RequestTracer | None, *more: EndObserver
    ) -> None:
        self._metrics = metrics
        self._log = RequestLog()
        self._tracer = tracer
        traced = () if tracer is None else (tracer,)
        self._at_end: Sequence[EndObserver] = (metrics, timeline, self._log, *traced, *more)

    def on_retry(self, reason: ErrorKind) -> None:
        self._metrics.on_retry(reason)

    def on_move(self) -> None:
        self._metrics.on_move()

    def on_end(self, record: RequestRecord) -> None:
        for observer in self._at_end:
            try:
                observer.on_end(record)
            except Exception:
                _log.exception("an observer failed", observer=type(observer).__name__, request_id=record.request_id)

    def on_refused(self, refusal: Refusal) -> None:
        self._metrics.on_refused(refusal.failure.kind)
        self._log.on_refused(refusal)
        if self._tracer is not None:
            self._tracer.on_refused(refusal)
