"""What happened when: rates, requests in flight, tokens and the server's gauges over the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from loadtest.gauges import GaugeSeries
from loadtest.record import RequestRecord

_MOST_BINS: Final = 80
_LEAST_BIN_S: Final = 0.25


def bin_width_s(span_s: float) -> float:
    """The smallest of 0.25, 0.5, 1, 2, 5, 10, … that needs at most 80 bins."""
    width = _LEAST_BIN_S
    for step in (0.25, 0.5, *(m * 10**e for e in range(6) for m in (1, 2, 5))):
        width = float(step)
        if span_s / width <= _MOST_BINS:
            break
    return width


def timeline(records: Sequence[RequestRecord], gauges: GaugeSeries, origin_s: float, span_s: float) -> Any:
    """Times are seconds since the start of the run; rates are per second; `t` holds the bins' left edges."""
    width = bin_width_s(span_s)
    edges = np.arange(0.0, math.ceil(max(span_s, width) / width) + 1) * width
    due = np.array([r.intended_s for r in records]) - origin_s
    end = np.array([r.end_s for r in records]) - origin_s
    ok = np.array([r.ok for r in records], dtype=bool)
    return {
        "bin_s": width,
        "t": edges[:-1].tolist(),
        "due_per_s": _rate(due, edges, width),
        "finished_per_s": _rate(end[ok], edges, width),
        "failed_per_s": _rate(end[~ok], edges, width),
        "output_tokens_per_s": _token_rate(records, origin_s, edges, width),
        "in_flight": (_seen(due, edges) - _seen(end, edges)).tolist(),
        "ttft_p50_ms": _binned_ttft(records, due, edges),
        "server": _gauges(gauges, origin_s),
    }


def _rate(times: NDArray[np.float64], edges: NDArray[np.float64], width: float) -> list[float]:
    counts, _ = np.histogram(times, edges)
    return (counts / width).tolist()  # type: ignore[no-any-return]


def _seen(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64 [bins]: how many of `times` lie before the right edge of each bin."""
    return np.searchsorted(np.sort(times), edges[1:]).astype(np.int64)


def _token_rate(
    records: Sequence[RequestRecord], origin_s: float, edges: NDArray[np.float64], width: float
) -> list[float]:
    total = np.zeros(len(edges) - 1)
    for record in records:
        if record.events_s:
            counts, _ = np.histogram(np.asarray(record.events_s) - origin_s, edges)
            total += counts * (record.output_tokens / len(record.events_s))
    return (total / width).tolist()  # type: ignore[no-any-return]


def _binned_ttft(
    records: Sequence[RequestRecord], due: NDArray[np.float64], edges: NDArray[np.float64]
) -> list[float | None]:
    """Median TTFT of the requests due in each bin."""
    bins: list[list[float]] = [[] for _ in range(len(edges) - 1)]
    for slot, record in zip(np.searchsorted(edges, due, side="right") - 1, records, strict=True):
        if record.ok and record.ttft_s is not None and 0 <= slot < len(bins):
            bins[slot].append(record.ttft_s)
    return [float(np.median(b)) * 1e3 if b else None for b in bins]


def _gauges(gauges: GaugeSeries, origin_s: float) -> Any:
    """None where the server showed none. NaN (a page without the gauge) becomes null."""
    if not gauges.times_s:
        return None
    series = {
        name: [None if math.isnan(v) else v for v in values]
        for name, values in gauges.values.items()
        if not all(map(math.isnan, values))
    }
    return {"t": [t - origin_s for t in gauges.times_s], **series}
