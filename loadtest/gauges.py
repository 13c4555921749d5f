"""The server's own gauges, read from its Prometheus page during the run: running, waiting, KV use."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from loadtest.client.http1 import (
    BadResponseError,
    ConnectFailedError,
    DisconnectedError,
    HttpClient,
    parse_url,
)

_PERIOD_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
# The first name of each list that the page has is used. Counts add up over labels (workers); of ratios
# the fullest worker's counts, since it is the one that makes requests wait.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "running": (
            "baton_requests_running",
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "llamacpp:requests_processing",
        ),
        "waiting": (
            "baton_requests_waiting",
            "vllm:num_requests_waiting",
            "sglang:num_queue_reqs",
            "llamacpp:requests_deferred",
        ),
        "kv_use": (
            "baton_kv_cache_usage_ratio",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "sglang:token_usage",
            "llamacpp:kv_cache_usage_ratio",
        ),
    }
)
_SAMPLE: Final = re.compile(
    rb"^(" + b"|".join(re.escape(n.encode()) for names in _NAMES.values() for n in names) + rb")(?:\{[^}]*\})? (\S+)",
    re.MULTILINE,
)


@dataclass(slots=True)
class GaugeSeries:
    """times_s: perf_counter of each sample; values: one value a gauge and sample, NaN where the page had none."""

    times_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _NAMES})


def read_gauges(page: bytes) -> dict[str, float]:
    """The known gauges of a Prometheus text page; other lines are not even parsed."""
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(page):
        try:
            found.setdefault(name.decode(), []).append(float(value))
        except ValueError:
            continue
    gauges = {}
    for gauge, names in _NAMES.items():
        samples = next((found[n] for n in names if n in found), None)
        if samples:
            gauges[gauge] = max(samples) if gauge == "kv_use" else sum(samples)
    return gauges


class GaugeSampler:
    """Reads one metrics URL once a second into `series`. A server without the page costs one failed request."""

    def __init__(self, url: str) -> None:
        self.series = GaugeSeries()
        address = parse_url(url)
        self._path = address.path or "/metrics"
        self._http = HttpClient(address)

    async def run(self) -> None:
        """Samples until cancelled, or until the first failure before any success."""
        try:
            while True:
                if not await self.sample() and not self.series.times_s:
                    return
                await asyncio.sleep(_PERIOD_S)
        finally:
            self._http.close()

    async def sample(self) -> dict[str, float]:
        """The gauges now, also kept in the series; empty where the page can't be read or has none of them."""
        try:
            answer = await self._http.get(self._path, {}, _TIMEOUT_S)
        except (ConnectFailedError, DisconnectedError, BadResponseError, TimeoutError):
            return {}
        gauges = read_gauges(answer.body) if answer.status == 200 else {}
        if gauges:
            self.series.times_s.append(time.perf_counter())
            for name, series in self.series.values.items():
                series.append(gauges.get(name, math.nan))
        return gauges

    def close(self) -> None:
        self._http.close()
