"""The router's Prometheus metrics, in a registry of their own. Names follow vLLM's set where the meaning is the same.

What others own (fleet, dispatcher) is read at scrape time: a worker's labels are gone when the worker is, and no
gauge can drift from the truth.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import ErrorKind
from router.cluster.fleet import Fleet
from router.cluster.worker_session import WorkerSession
from router.dispatcher import Dispatcher
from router.request_record import RequestRecord

# Seconds, from a GPU's single step to a CPU's long prompt.
STEP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
PHASE_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class RouterMetrics:
    """Observer of requests and of writes; thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_{name}", text, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "Receipt to the first token's write", PHASE_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Between consecutive tokens' writes", STEP_BUCKETS)
        self._tpot = histogram("time_per_output_token_seconds", "A request's mean inter-token latency", STEP_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "Receipt to the end", REQUEST_BUCKETS)
        self._queue = histogram("request_queue_seconds", "Receipt to the prefill's first step", PHASE_BUCKETS)
        self._prefill = histogram("request_prefill_seconds", "Prefill's first step to first token", PHASE_BUCKETS)
        self._transfer = histogram("transfer_seconds", "First block sent to commit", PHASE_BUCKETS)
        self._decode = histogram("request_decode_seconds", "First decode step to the end", REQUEST_BUCKETS)
        self._transfer_bytes = counter("transfer_bytes", "KV bytes sent from prefill to decode workers")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in workers' prefix caches")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in workers' prefix caches")
        self._requests = counter("requests", "Ended requests", "outcome")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests")
        self._generation_tokens = counter("generation_tokens", "Output tokens of ended requests")
        self._retries = counter("request_retries", "Attempts repeated on other workers", "reason")

    def watch(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        """Add the gauges that are read from these two."""
        self.registry.register(_ClusterCollector(fleet, dispatcher))

    def page(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    # -- requests

    def on_retry(self, reason: ErrorKind) -> None:
        self._retries.labels(reason=str(reason)).inc()

    def on_refused(self, kind: ErrorKind) -> None:
        """A request that never ran."""
        self._requests.labels(outcome=str(kind)).inc()

    def on_end(self, record: RequestRecord) -> None:
        self._requests.labels(outcome=record.outcome).inc()
        self._e2e.observe(record.e2e_s)
        self._prompt_tokens.inc(record.usage.prompt_tokens)
        self._generation_tokens.inc(record.usage.completion_tokens)
        if not record.prefilled:
            return
        timings = record.timings
        self._prefix_queries.inc(record.usage.prompt_tokens)
        self._prefix_hits.inc(record.usage.cached_tokens)
        self._queue.observe(record.queue_s)
        self._prefill.observe(timings.prefill_s)
        if timings.transfer_bytes:
            self._transfer.observe(timings.transfer_s)
            self._transfer_bytes.inc(timings.transfer_bytes)
        if timings.decode_s:
            self._decode.observe(timings.decode_s)

    # -- writes

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def on_tokens(self, gap_s: float, num_tokens: int) -> None:
        """num_tokens came in one write, gap_s after the one before."""
        for _ in range(num_tokens):
            self._itl.observe(gap_s / num_tokens)

    def on_last_token(self, mean_gap_s: float) -> None:
        self._tpot.observe(mean_gap_s)


class _ClusterCollector(Collector):
    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        running, waiting = self._dispatcher.num_running, self._dispatcher.num_waiting
        yield GaugeMetricFamily("baton_requests_running", "Requests that a worker computes", value=running)
        yield GaugeMetricFamily("baton_requests_waiting", "Requests that no worker computes yet", value=waiting)
        yield self._workers()
        yield self._kv_usage()
        late = CounterMetricFamily("baton_late_frames", "Workers' frames for transfers that were over")
        late.add_metric((), self._fleet.num_late_frames)
        yield late

    def _workers(self) -> Metric:
        family = GaugeMetricFamily("baton_workers", "Known workers", labels=("role", "state"))
        tally = Tally((s.record.role, _worker_state(s)) for s in self._fleet.sessions())
        for labels, count in sorted(tally.items()):
            family.add_metric(labels, count)
        return family

    def _kv_usage(self) -> Metric:
        name, text = "baton_kv_cache_usage_ratio", "Part of a worker's KV blocks that sequences hold"
        family = GaugeMetricFamily(name, text, labels=("worker_id", "role"))
        for session in self._fleet.sessions():
            report = session.report
            if report is not None and report.num_blocks:
                used = 1.0 - report.num_free_blocks / report.num_blocks
                family.add_metric((session.record.worker_id, session.record.role), used)
        return family


def _worker_state(session: WorkerSession) -> str:
    return "draining" if session.ready and session.record.draining else str(session.state)
