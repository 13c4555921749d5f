"""The report of one run as JSON: schema `baton.bench.run/1`, described in docs/LOADTEST.md."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from loadtest.client.target import TargetInfo
from loadtest.monitor import ClientLimits, saturation_reasons
from loadtest.record import RequestRecord
from loadtest.report.groups import LatencySamples, fairness_report, group_report, latency_samples
from loadtest.report.machine import describe_machine
from loadtest.report.timeline import timeline
from loadtest.runner import RunLimits, RunResult
from loadtest.slo import Slo
from loadtest.stats import curve, summarize
from loadtest.streams import StreamSpec

RUN_SCHEMA: Final = "baton.bench.run/1"


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a report needs beside the result. warmup_s: requests due earlier load the server but are not measured."""

    target: TargetInfo
    streams: Sequence[StreamSpec]
    limits: RunLimits
    seed: int
    command: str
    warmup_s: float = 0.0
    slo: Slo | None = None
    client_limits: ClientLimits = field(default_factory=ClientLimits)


def measured_records(context: RunContext, result: RunResult) -> list[RequestRecord]:
    """Requests due after the warm-up, in the order they were due."""
    start = result.origin_s + context.warmup_s
    # The closed loop's first requests may start a scheduling step before the origin.
    records = [r for r in result.records if r.intended_s >= start or not context.warmup_s]
    return sorted(records, key=lambda r: (r.intended_s, r.index))


def run_report(context: RunContext, result: RunResult) -> dict[str, Any]:
    """Everything about one run; plain JSON values only."""
    records = measured_records(context, result)
    samples = latency_samples(records)
    span_s = _span(records)
    by_stream = [[r for r in records if r.stream == i] for i in range(len(context.streams))]
    reasons = _invalid_reasons(context, result, records, samples)
    return {
        "schema": RUN_SCHEMA,
        "started_at": datetime.datetime.fromtimestamp(result.started_at, datetime.UTC).isoformat(timespec="seconds"),
        "command": context.command,
        "machine": describe_machine(),
        "target": {
            "url": context.target.url,
            "api": context.target.api,
            "model": context.target.model,
            "max_model_len": context.target.max_model_len,
        },
        "config": _config(context),
        "validity": {"valid": not reasons, "reasons": reasons, "notes": _notes(context, result, records)},
        "span_s": span_s,
        "client": {
            "send_lag_ms": summarize(samples.send_lag, 1e3),
            "loop_lag_ms": summarize(np.asarray(result.client.loop_lag_s), 1e3),
            "cpu_ratio": summarize(np.asarray(result.client.cpu_ratio)),
        },
        "overall": group_report(records, samples, span_s, context.slo),
        "tenants": {
            stream.name: _group(own, span_s, context.slo)
            for stream, own in zip(context.streams, by_stream, strict=True)
        },
        "classes": {
            name: _group([r for r in records if context.streams[r.stream].class_name == name], span_s, context.slo)
            for name in dict.fromkeys(s.class_name for s in context.streams)
        },
        "fairness": fairness_report(context.streams, by_stream),
        "timeline": timeline(
            sorted(result.records, key=lambda r: r.intended_s),
            result.gauges,
            result.origin_s,
            max((r.end_s - result.origin_s for r in result.records), default=0.0),
        ),
        "curves_ms": {name: curve(getattr(samples, name), 1e3) for name in ("ttft", "itl", "tpot", "e2e")},
    }


def request_rows(context: RunContext, result: RunResult) -> list[dict[str, Any]]:
    """One object a request for --save-requests; seconds since the start of the run."""
    origin = result.origin_s
    return [
        {
            "index": r.index,
            "tenant": context.streams[r.stream].name,
            "turn": r.turn,
            "intended_s": r.intended_s - origin,
            "sent_s": r.sent_s - origin if r.sent_s else None,
            "end_s": r.end_s - origin,
            "events_s": [t - origin for t in r.events_s],
            "input_tokens": r.usage_prompt_tokens,
            "cached_tokens": r.usage_cached_tokens,
            "output_tokens": r.output_tokens,
            "requested_tokens": r.requested_tokens,
            "finish_reason": r.finish_reason,
            "error": r.failure_name or None,
            "error_detail": r.failure_detail or None,
        }
        for r in sorted(result.records, key=lambda r: (r.intended_s, r.index))
    ]


def _group(records: Sequence[RequestRecord], span_s: float, slo: Slo | None) -> Any:
    return group_report(records, latency_samples(records), span_s, slo)


def _span(records: Sequence[RequestRecord]) -> float:
    """From the first due time to the last end: the drain at the end counts, so a backlog can't be hidden."""
    if not records:
        return 1.0
    return max(1e-9, max(r.end_s for r in records) - records[0].intended_s)


def _config(context: RunContext) -> dict[str, Any]:
    return {
        "seed": context.seed,
        "requests": context.limits.requests,
        "duration_s": context.limits.duration_s,
        "timeout_s": context.limits.timeout_s,
        "warmup_s": context.warmup_s,
        "slo": context.slo.describe() if context.slo else None,
        "streams": [s.describe() for s in context.streams],
    }


def _invalid_reasons(
    context: RunContext, result: RunResult, records: Sequence[RequestRecord], samples: LatencySamples
) -> list[str]:
    reasons = saturation_reasons(
        context.client_limits,
        send_lag_p99_s=float(np.percentile(samples.send_lag, 99)) if len(samples.send_lag) else 0.0,
        ttft_p50_s=float(np.median(samples.ttft)) if len(samples.ttft) else 0.0,
        itl_p50_s=float(np.median(samples.itl)) if len(samples.itl) else 0.0,
        load=result.client,
    )
    if result.stopped:
        reasons.append(f"stopped before its end: {result.stopped}")
    if not any(r.ok for r in records):
        reasons.append("no request was served")
    return reasons


def _notes(context: RunContext, result: RunResult, records: Sequence[RequestRecord]) -> list[str]:
    """Things that a reader should know though they don't spoil the result."""
    notes = []
    if result.clipped:
        notes.append(f"{result.clipped} prompts were cut to fit the model's context")
    if context.limits.requests is not None and len(result.records) < context.limits.requests:
        notes.append(f"the plan ended after {len(result.records)} of {context.limits.requests} requests")
    if any(r.ok and r.usage_output_tokens is None for r in records):
        notes.append("the server sent no usage: output tokens are counted as events, cached tokens are unknown")
    return notes
