"""The figures of one group of requests: all of them, one tenant's, or one class's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.record import Failure, RequestRecord
from loadtest.report.peak import gaps_at_peak
from loadtest.slo import Slo
from loadtest.stats import Samples, jain_index, summarize
from loadtest.streams import StreamSpec

# A generated token costs more than a prompt token: the weight of VTC (Sheng et al., OSDI 2024) and AIBrix.
_OUTPUT_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class LatencySamples:
    """Seconds, one a request (ttft, tpot, e2e, send_lag) or one a gap between events (itl, and those of them while most
    streams were decoding); successful ones only,
    save for send_lag, which tells of the client."""

    ttft: Samples
    ttft_from_send: Samples
    itl: Samples
    itl_at_peak: Samples
    tpot: Samples
    e2e: Samples
    send_lag: Samples


def latency_samples(records: Sequence[RequestRecord]) -> LatencySamples:
    served = [r for r in records if r.ok]
    gaps = [np.diff(r.events_s) for r in served if len(r.events_s) > 1]
    return LatencySamples(
        ttft=_samples([r.ttft_s for r in served]),
        ttft_from_send=_samples([r.events_s[0] - r.sent_s for r in served]),
        itl=np.concatenate(gaps) if gaps else _samples([]),
        itl_at_peak=gaps_at_peak(served),
        tpot=_samples([r.tpot_s for r in served]),
        e2e=_samples([r.e2e_s for r in served]),
        send_lag=_samples([r.sent_s - r.intended_s for r in records if r.sent_s]),
    )


def group_report(records: Sequence[RequestRecord], samples: LatencySamples, span_s: float, slo: Slo | None) -> Any:
    """records: the group's measured requests. span_s: of the whole run's window, so that groups add up."""
    served = [r for r in records if r.ok]
    counted = [r for r in records if r.failure is not Failure.CANCELLED]
    failed = [r for r in counted if not r.ok]
    num_input, num_output = _token_sums(served)
    return {
        "requests": {
            "sent": len(records),
            "ok": len(served),
            "failed": len(failed),
            "cancelled": len(records) - len(counted),
        },
        "errors": dict(Counter(r.failure_name for r in failed).most_common()),
        "error_examples": {r.failure_name: r.failure_detail for r in reversed(failed)},
        "latency_ms": {
            "ttft": summarize(samples.ttft, 1e3),
            "ttft_from_send": summarize(samples.ttft_from_send, 1e3),
            "itl": summarize(samples.itl, 1e3),
            "itl_at_peak": summarize(samples.itl_at_peak, 1e3),
            "tpot": summarize(samples.tpot, 1e3),
            "e2e": summarize(samples.e2e, 1e3),
        },
        "tokens": {
            "input": num_input,
            "output": num_output,
            "input_per_request": summarize(_samples([r.usage_prompt_tokens for r in served])),
            "output_per_request": summarize(_samples([r.output_tokens for r in served])),
            # Answers shorter than asked for although EOS was to be ignored make a server look fast.
            "short_answers": sum(r.output_tokens < r.requested_tokens for r in served),
        },
        "throughput": {
            "requests_per_s": len(served) / span_s,
            "input_tokens_per_s": None if num_input is None else num_input / span_s,
            "output_tokens_per_s": num_output / span_s,
        },
        "goodput": _goodput(counted, span_s, slo),
        "cache": _cache(served),
    }


def fairness_report(streams: Sequence[StreamSpec], by_stream: Sequence[Sequence[RequestRecord]]) -> Any:
    """Jain indices over tenants; None where there is only one.

    service: weighted tokens served for each unit of weight. demand_met: share of the asked work that was served, which
    is the fairer question where tenants ask for different amounts.
    """
    if len(streams) < 2:
        return None
    service, met = [], []
    for stream, records in zip(streams, by_stream, strict=True):
        served = [r for r in records if r.ok]
        num_input, num_output = _token_sums(served)
        service.append(((num_input or 0) + _OUTPUT_WEIGHT * num_output) / stream.weight)
        met.append(len(served) / len(records) if records else 0.0)
    return {
        "jain_service": jain_index(service),
        "jain_demand_met": jain_index(met),
        "service_tokens": dict(zip([s.name for s in streams], service, strict=True)),
    }


def _goodput(counted: Sequence[RequestRecord], span_s: float, slo: Slo | None) -> Any:
    if slo is None:
        return None
    num_good = sum(map(slo.is_met, counted))
    return {
        "slo": slo.describe(),
        "good": num_good,
        "fraction": num_good / len(counted) if counted else 0.0,
        "requests_per_s": num_good / span_s,
    }


def _cache(served: Sequence[RequestRecord]) -> Any:
    """None where the server does not tell how many prompt tokens it had cached."""
    known = [r for r in served if r.usage_cached_tokens is not None and r.usage_prompt_tokens]
    if not known:
        return None
    cached = sum(r.usage_cached_tokens or 0 for r in known)
    prompt = sum(r.usage_prompt_tokens or 0 for r in known)
    return {"cached_tokens": cached, "prompt_tokens": prompt, "hit_ratio": cached / prompt}


def _token_sums(served: Sequence[RequestRecord]) -> tuple[int | None, int]:
    """Input tokens are the server's count: None where it gives none."""
    inputs = [r.usage_prompt_tokens for r in served if r.usage_prompt_tokens is not None]
    return (sum(inputs) if inputs else None), sum(r.output_tokens for r in served)


def _samples(values: Sequence[float | None]) -> Samples:
    return np.asarray([v for v in values if v is not None], dtype=np.float64)
