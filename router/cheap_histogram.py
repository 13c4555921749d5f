"""A histogram for what happens at every token: no lock, no label lookup, a fifth of prometheus_client's cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.metrics import SECONDS_BUCKETS


class CheapHistogram(Collector):
    """Seconds, in the common buckets. For the event loop's thread alone, scrapes included. name: with its unit."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """The same value `times` times."""
        self._counts[bisect_left(SECONDS_BUCKETS, seconds)] += times
        self.sum_s += seconds * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, SECONDS_BUCKETS), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self.sum_s)
