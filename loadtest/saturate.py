"""`baton bench saturate`: probe a real server at rising rates until its objective breaks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from loadtest.bench import Bench
from loadtest.errors import BenchError
from loadtest.rate_search import LOST_CAUSE, Probe, SearchOptions, SearchOutcome, search
from loadtest.record import RequestRecord
from loadtest.report.run_report import measured_records, run_report
from loadtest.runner import LoadRun, RunLimits
from loadtest.slo import met_fraction
from loadtest.streams import StreamSpec

SATURATE_SCHEMA: Final = "baton.bench.saturate/1"
_IDLE_POLL_S: Final = 0.5
_MAX_COOL_DOWN_S: Final = 60.0


class LostCause:
    """Ends a probe once its objective is out of reach: an overloaded server's backlog takes long to drain."""

    def __init__(self, options: SearchOptions, rate: float) -> None:
        self._slo = options.slo
        expected = rate * options.duration_s(rate)
        # Half again what may be missed, for the chance in the number of arrivals.
        self._allowed = 1.5 * (1 - options.fraction) * expected + 5
        self._missed = 0

    def done(self, record: RequestRecord) -> None:
        self._missed += not self._slo.is_met(record)

    def watch(self, run: LoadRun) -> None:
        now = time.perf_counter()
        late = sum(self._is_late(r, now) for r in run.running)
        if self._missed + late > self._allowed:
            run.stop(LOST_CAUSE)

    def _is_late(self, record: RequestRecord, now: float) -> bool:
        waited_ms = (now - record.intended_s) * 1e3
        no_token = not record.events_s and self._slo.ttft_ms is not None and waited_ms > self._slo.ttft_ms
        return no_token or (self._slo.e2e_ms is not None and waited_ms > self._slo.e2e_ms)


async def saturate(bench: Bench, options: SearchOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Search on a real server and report: schema `baton.bench.saturate/1`. say: one line after each probe."""
    shares = _rate_shares(bench.options.streams)

    async def probe(rate: float, number: int) -> Probe:
        streams = [s.at_rate(rate * share) for s, share in zip(bench.options.streams, shares, strict=True)]
        limits = RunLimits(duration_s=options.duration_s(rate), timeout_s=bench.options.limits.timeout_s)
        # Another seed for each: the prompts of the last probe are in the server's prefix cache.
        seed = bench.options.seed + number
        lost = LostCause(options, rate)
        result = await bench.run(streams, limits, seed=seed, watch=lost.watch, on_done=lost.done)
        context = bench.context(streams, limits, seed)
        fraction = met_fraction(options.slo, measured_records(context, result))
        report = run_report(context, result)
        say(f"{rate:9.3f}/s  {fraction:6.1%} within the objective{'  (ended early)' if result.stopped else ''}")
        saturated = any("client saturated" in reason for reason in report["validity"]["reasons"])
        return Probe(rate, fraction, report, result.stopped, saturated)

    async def cool_down() -> None:
        deadline = time.monotonic() + _MAX_COOL_DOWN_S
        pause_s = options.cool_down_s
        while time.monotonic() < deadline:
            await asyncio.sleep(pause_s)
            # None: the server does not say.
            if await bench.server_is_idle() is not False:
                return
            pause_s = _IDLE_POLL_S

    return saturate_report(options, await search(options, probe, cool_down))


def saturate_report(options: SearchOptions, outcome: SearchOutcome) -> dict[str, Any]:
    """probes in order of rate; best: the full report of the best rate's run, None where none passed."""
    probes = sorted(outcome.probes, key=lambda p: p.rate)
    best = max((p for p in probes if p.rate == outcome.best), key=lambda p: p.fraction, default=None)
    first = outcome.probes[0].report
    return {
        "schema": SATURATE_SCHEMA,
        "started_at": first["started_at"],
        "command": first["command"],
        "machine": first["machine"],
        "target": first["target"],
        "search": {
            "slo": options.slo.describe(),
            "fraction": options.fraction,
            "tolerance": options.tolerance,
            "probe_s": options.probe_s,
            "ended": outcome.ended,
        },
        "best_rate_per_s": outcome.best or None,
        "failed_rate_per_s": None if math.isinf(outcome.failed) else outcome.failed,
        "probes": [_probe_row(p, options) for p in probes],
        "best": best.report if best else None,
    }


def _probe_row(probe: Probe, options: SearchOptions) -> dict[str, Any]:
    overall = probe.report["overall"]
    return {
        "rate_per_s": probe.rate,
        "passed": probe.fraction >= options.fraction and not probe.stopped,
        "fraction": probe.fraction,
        "valid": not probe.client_saturated,
        "reasons": probe.report["validity"]["reasons"],
        "sent": overall["requests"]["sent"],
        "failed": overall["requests"]["failed"],
        "goodput_per_s": overall["goodput"]["requests_per_s"],
        "throughput_per_s": overall["throughput"]["requests_per_s"],
        "output_tokens_per_s": overall["throughput"]["output_tokens_per_s"],
        "ttft_p95_ms": overall["latency_ms"]["ttft"]["p95"],
        "itl_p95_ms": overall["latency_ms"]["itl"]["p95"],
        "e2e_p95_ms": overall["latency_ms"]["e2e"]["p95"],
    }


def _rate_shares(streams: Sequence[StreamSpec]) -> list[float]:
    """Each stream's share of the total rate, kept while the total is searched."""
    for stream in streams:
        if stream.arrival.kind not in ("poisson", "gamma", "constant"):
            raise BenchError(
                f"saturate varies a rate, and arrival {stream.arrival.kind} has none;"
                " use --arrival poisson, gamma or constant"
            )
    total = sum(s.arrival.rate for s in streams)
    return [s.arrival.rate / total for s in streams]
