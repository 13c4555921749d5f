"""Service-level objectives: which requests were served well enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.errors import BenchError
from loadtest.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds, all to be met by one request; None is no limit.

    ttft, e2e: from the intended send time. tpot: the request's mean per token. itl: the 95th percentile of the
    request's own gaps between events. itl_max: its longest gap.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    itl_max_ms: float | None = None
    e2e_ms: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Only a request that ended properly can meet it. One-token answers have no gaps to judge."""
        if not record.ok or record.ttft_s is None:
            return False
        if not (_within(record.ttft_s, self.ttft_ms) and _within(record.e2e_s, self.e2e_ms)):
            return False
        if record.tpot_s is not None and not _within(record.tpot_s, self.tpot_ms):
            return False
        if len(record.events_s) < 2 or (self.itl_ms is None and self.itl_max_ms is None):
            return True
        gaps = np.diff(record.events_s)
        return _within(float(np.percentile(gaps, 95)), self.itl_ms) and _within(float(gaps.max()), self.itl_max_ms)

    def describe(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def parse_slo(text: str) -> Slo:
    """`ttft_ms=200,itl_ms=50` → Slo. Raises BenchError naming what is wrong."""
    names = [f.name for f in dataclasses.fields(Slo)]
    limits: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        if name not in names or not equals:
            raise BenchError(f"--slo: {item!r} is not one of {', '.join(names)} (name=milliseconds)")
        try:
            limits[name] = float(value)
        except ValueError:
            raise BenchError(f"--slo: {item!r}: {value!r} is not a number of milliseconds") from None
        if not limits[name] > 0:
            raise BenchError(f"--slo: {item!r}: a limit must be above 0")
    if not limits:
        raise BenchError(f"--slo {text!r}: sets no limit; e.g. --slo ttft_ms=200,itl_ms=50")
    return Slo(**limits)


def met_fraction(slo: Slo, records: Sequence[RequestRecord]) -> float:
    """Share of requests served within the limits, of all that were sent: failures count against it."""
    return sum(map(slo.is_met, records)) / len(records) if records else 0.0


def _within(seconds: float, limit_ms: float | None) -> bool:
    return limit_ms is None or seconds * 1e3 <= limit_ms
