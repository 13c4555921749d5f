"""What became of a request, phase by phase: for GET /v1/requests/{id}/timeline, and for its trace.

                    ┌ admit ┬ queue ┬ place ┬ reserve ┬ queue ┬ prefill ┬──── decode ────┐
    router's stamps ▲       ▲       ▲       ▲         ▲                 ▲ first token    ▲ end
    worker's durations                                  ◄─────┼─────────┘ ◄── transfer ──┘

A worker says how long a phase took by its own clock; where it stands is reckoned from the arrival of the worker's frame
at the router. So durations are exact, and places are late by a frame's delay at most. Where a worker never said (it
died, or the request ended first), the router's own stamps stand in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from common.tracing_names import SpanName
from router.request_record import Attempt, Failure, RequestRecord

# Of requests that share an id, such as the prompts of one HTTP request, the newest.
MAX_ENTRIES_AN_ID: Final = 128


@dataclass(frozen=True, slots=True)
class Phase:
    """start, end: monotonic seconds of the router; end None: not over yet. attempt: 1, 2, …

    worker_id: "" for a phase of the router's own. cut: it did not end by itself, the end of its attempt came upon it.
    """

    name: SpanName
    start: float
    end: float | None
    attempt: int
    worker_id: str = ""
    cut: bool = False


class Timeline:
    """The newest `capacity` ended requests, by request id. An entry takes 2 to 7 KiB: 2,048 of them at most 14 MiB."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._newest: deque[RequestRecord] = deque()
        self._by_id: dict[str, deque[RequestRecord]] = {}

    def __len__(self) -> int:
        return len(self._newest)

    @property
    def capacity(self) -> int:
        return self._capacity

    def on_end(self, record: RequestRecord) -> None:
        if self._capacity == 0:
            return
        if len(self._newest) == self._capacity:
            self._forget(self._newest.popleft())
        self._newest.append(record)
        self._by_id.setdefault(record.request_id, deque()).append(record)

    def find(self, request_id: str) -> list[RequestRecord]:
        """Oldest first; empty where nothing is known."""
        return list(self._by_id.get(request_id, ()))[-MAX_ENTRIES_AN_ID:]

    def _forget(self, oldest: RequestRecord) -> None:
        records = self._by_id[oldest.request_id]
        records.popleft()
        if not records:
            del self._by_id[oldest.request_id]


def phases_of(record: RequestRecord) -> list[Phase]:
    """In order of their start. Of a request that runs, the last ones are not over."""
    end = None if record.outcome == "running" else record.ended_at
    phases = [
        Phase(SpanName.ADMIT, record.received_at, record.submitted_at, 1),
        _until(SpanName.QUEUE, record.submitted_at, record.attempts[0].placing_at, end, 1),
    ]
    failed_at: float | None = None
    for number, attempt in enumerate(record.attempts, start=1):
        cut_at = end if attempt.failed_at is None else attempt.failed_at
        if failed_at is not None:
            phases.append(_until(SpanName.MIGRATE, failed_at, attempt.first_token_at, cut_at, number))
        phases += _phases_of_attempt(attempt, number, cut_at)
        # A first token alone decodes nothing.
        if attempt.first_token_at is not None and record.usage.completion_tokens > attempt.first_index + 1:
            phases.append(_decoding(attempt, attempt.first_token_at, number, cut_at))
        failed_at = attempt.failed_at
    return sorted(phases, key=lambda phase: phase.start)


def failure_of(phase: Phase, record: RequestRecord) -> Failure | None:
    """What came upon a phase that was not over; None also where it was a regular end, such as a stop string."""
    return (record.attempts[phase.attempt - 1].failure or record.failure) if phase.cut else None


def _until(
    name: SpanName, start: float, end: float | None, cut_at: float | None, number: int, worker_id: str = ""
) -> Phase:
    """end: the phase's own. cut_at: of the attempt, for the phase that it comes upon."""
    return Phase(name, start, cut_at if end is None else end, number, worker_id, cut=end is None and cut_at is not None)


def _phases_of_attempt(attempt: Attempt, number: int, cut_at: float | None) -> Iterator[Phase]:
    if attempt.placing_at is None:
        return
    yield _until(SpanName.PLACE, attempt.placing_at, attempt.placed_at, cut_at, number)
    if attempt.placed_at is None:
        return
    if attempt.prefill_id:
        yield _until(SpanName.RESERVE, attempt.placed_at, attempt.sent_at, cut_at, number, attempt.decode_id)
    if attempt.sent_at is not None:
        yield from _computing(attempt, attempt.sent_at, number, cut_at)
        yield from _moving(attempt, attempt.sent_at, number)


def _computing(attempt: Attempt, sent_at: float, number: int, cut_at: float | None) -> Iterator[Phase]:
    worker_id = attempt.prefill_id or attempt.decode_id
    started_at, first_token_at = sent_at, attempt.first_token_at
    if attempt.computed is not None and first_token_at is not None:
        timings = attempt.computed.timings
        started_at = max(sent_at, first_token_at - timings.prefill_s)
        yield Phase(SpanName.QUEUE, max(sent_at, started_at - timings.queue_s), started_at, number, worker_id)
    yield _until(SpanName.PREFILL, started_at, first_token_at, cut_at, number, worker_id)


def _moving(attempt: Attempt, sent_at: float, number: int) -> Iterator[Phase]:
    if attempt.prefill_id and attempt.computed is not None and attempt.computed.timings.transfer_s:
        at, timings = attempt.computed.at, attempt.computed.timings
        yield Phase(SpanName.TRANSFER, max(sent_at, at - timings.transfer_s), at, number, attempt.prefill_id)


def _decoding(attempt: Attempt, first_token_at: float, number: int, cut_at: float | None) -> Phase:
    decoded = attempt.decoded
    if decoded is None or not decoded.timings.decode_s:
        return _until(SpanName.DECODE, first_token_at, None, cut_at, number, attempt.decode_id)
    started_at = max(first_token_at, decoded.at - decoded.timings.decode_s)
    return Phase(SpanName.DECODE, started_at, decoded.at, number, attempt.decode_id)


# -- as JSON


def timeline_entry(record: RequestRecord, wall_clock_lead_s: float) -> dict[str, Any]:
    """One request's timeline as the API shows it. wall_clock_lead_s: Unix time less the router's clock."""
    usage, running, first_token_at = record.usage, record.outcome == "running", record.first_token_at
    return {
        "request_id": record.request_id,
        "trace_id": None if record.trace is None else record.trace.trace_id,
        "operation": record.operation,
        "state": record.phase if running else _final_state(record),
        "outcome": None if running else record.outcome,
        "error": _error(record.failure),
        "received_at": round(record.received_at + wall_clock_lead_s, 3),
        "elapsed_ms": _ms(record.e2e_s),
        "first_token_ms": None if first_token_at is None else _ms(first_token_at - record.received_at),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "transfer_bytes": sum(a.computed.timings.transfer_bytes for a in record.attempts if a.computed is not None),
        "retries": len(record.attempts) - 1,
        "attempts": [_attempt(attempt) for attempt in record.attempts],
        "phases": [_phase(phase, record) for phase in phases_of(record)],
    }


def _final_state(record: RequestRecord) -> str:
    if record.failure is None:
        return "finished"
    return "aborted" if record.outcome == "abort" else "failed"


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "transfer_id": attempt.transfer_id or None,
        "prefill_worker": attempt.prefill_id or None,
        "decode_worker": attempt.decode_id or None,
        "error": _error(attempt.failure),
        "blamed_workers": list(attempt.blamed_ids),
    }


def _phase(phase: Phase, record: RequestRecord) -> dict[str, Any]:
    failure = failure_of(phase, record)
    return {
        "phase": phase.name,
        "attempt": phase.attempt,
        "worker_id": phase.worker_id or None,
        "start_ms": _ms(phase.start - record.received_at),
        "duration_ms": None if phase.end is None else _ms(phase.end - phase.start),
        "error": None if failure is None else failure.kind,
    }


def _error(failure: Failure | None) -> dict[str, str] | None:
    return None if failure is None else {"kind": failure.kind, "message": failure.message}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
