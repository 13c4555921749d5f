"""One line for each request that came to a bad end, and it explains itself. Good ends are told at level debug."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import ErrorKind
from common.telemetry import get_logger
from common.tracing import TraceContext
from router.request_record import Failure, Refusal, RequestRecord

_log = get_logger(__name__)


class RequestLog:
    """Fields: see docs/TRACING.md. Never a prompt, never a text."""

    def on_end(self, record: RequestRecord) -> None:
        failure, ids = record.failure, _ids(record.request_id, record.trace)
        if failure is None:
            # Thousands a second: not even the fields are put together in vain.
            if _log.is_enabled_for(logging.DEBUG):
                _log.debug("request finished", **ids, outcome=record.outcome, **_figures(record))
            return
        _log_of(failure)(
            "request aborted" if failure.kind is ErrorKind.CANCELLED else "request failed",
            **ids,
            kind=str(failure.kind),
            message=failure.message,
            phase=record.phase,
            workers=list(dict.fromkeys(w for attempt in record.attempts for w in attempt.worker_ids)),
            transfer_ids=[a.transfer_id for a in record.attempts if a.transfer_id],
            causes=[_cause(a.failure, a.blamed_ids) for a in record.attempts if a.failure is not None],
            **_figures(record),
        )

    def on_refused(self, refusal: Refusal) -> None:
        _log_of(refusal.failure)(
            "request refused",
            **_ids(refusal.request_id, refusal.trace),
            kind=str(refusal.failure.kind),
            message=refusal.failure.message,
            elapsed_s=round(refusal.refused_at - refusal.received_at, 4),
        )


def _log_of(failure: Failure) -> Callable[..., Any]:
    """A bug: error. Something else is wrong here: warning. The client asked for too much, or left: info."""
    if failure.kind is ErrorKind.INTERNAL:
        return _log.error
    return _log.warning if failure.is_fault else _log.info


def _figures(record: RequestRecord) -> dict[str, int | float]:
    return {
        "attempts": len(record.attempts),
        "prompt_tokens": record.usage.prompt_tokens,
        "tokens": record.usage.completion_tokens,
        "elapsed_s": round(record.e2e_s, 4),
    }


def _cause(failure: Failure, blamed_ids: Sequence[str]) -> str:
    return f"{failure.kind} ({', '.join(blamed_ids)}): {failure.message}"


def _ids(request_id: str, trace: TraceContext | None) -> dict[str, str]:
    ids = {"request_id": request_id}
    return ids if trace is None else {**ids, "trace_id": trace.trace_id}
