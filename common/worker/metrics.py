"""A worker's Prometheus metrics, in a registry of its own: nothing is global, nothing starts a server on import.

State (running, waiting, blocks, totals) is read at scrape time from the engine's last load report; durations are
observed when a leg ends, from its own timings. Labels have a closed set of values.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from common.engine.messages import EngineNews, LoadReport
from common.errors import StartupError
from common.worker.info import WorkerInfo

_LONG_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

CLOSE_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """Counts from the start: payload bytes moved, resends included, and failures by ErrorKind's value."""

    num_bytes: int
    failures: Mapping[str, int]


class WorkerMetrics:
    """Registers in `registry`. transfer_totals: read at scrape time, in the scraper's thread."""

    def __init__(
        self, registry: CollectorRegistry, info: WorkerInfo, transfer_totals: Callable[[], TransferTotals]
    ) -> None:
        self.registry = registry
        self._load = LoadReport(num_free_blocks=info.num_blocks, num_blocks=info.num_blocks)
        self.registry.register(_StateCollector(lambda: self._load, transfer_totals))
        self._queue_s = self._histogram("baton_request_queue_seconds", "Arrival to first step, or to a reservation")
        self._prefill_s = self._histogram("baton_request_prefill_seconds", "First step to first token")
        self._decode_s = self._histogram("baton_request_decode_seconds", "First decode step to the end")
        self._transfer_s = self._histogram("baton_transfer_seconds", "First block sent to commit")
        self._step_s = Histogram("baton_step_seconds", "One engine step", buckets=_STEP_BUCKETS, registry=self.registry)
        self._set_info(info)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_LONG_BUCKETS, registry=self.registry)

    def _set_info(self, info: WorkerInfo) -> None:
        model = {"role": info.role, "model_name": info.model_name, "dtype": info.dtype}
        model |= {"model_fingerprint": info.model_fingerprint, "max_model_len": str(info.max_model_len)}
        cache = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
        Gauge("baton_model_info", "What this worker runs; always 1", list(model), registry=self.registry).labels(
            **model
        ).set(1)
        Gauge("baton_cache_config_info", "Its KV cache; always 1", list(cache), registry=self.registry).labels(
            **cache
        ).set(1)

    def on_news(self, news: EngineNews) -> None:
        """Once an engine round."""
        self._load = news.load
        if news.step_s is not None:
            self._step_s.observe(news.step_s)
        for owner_news in news.by_owner.values():
            for output in owner_news.outputs:
                if output.timings is None:
                    continue
                self._queue_s.observe(output.timings.queue_s)
                for histogram, seconds in (
                    (self._prefill_s, output.timings.prefill_s),
                    (self._decode_s, output.timings.decode_s),
                    (self._transfer_s, output.timings.transfer_s),
                ):
                    if seconds:
                        histogram.observe(seconds)


class _StateCollector(Collector):
    """What is a state or a total already, read when somebody asks."""

    def __init__(self, load: Callable[[], LoadReport], transfer_totals: Callable[[], TransferTotals]) -> None:
        self._load = load
        self._transfer_totals = transfer_totals

    def collect(self) -> Iterable[Metric]:
        load, transfer = self._load(), self._transfer_totals()
        used = load.num_blocks - load.num_free_blocks
        yield GaugeMetricFamily("baton_requests_running", "Requests that hold blocks", load.num_running)
        yield GaugeMetricFamily("baton_requests_waiting", "Requests that wait for blocks", load.num_waiting)
        yield GaugeMetricFamily(
            "baton_kv_cache_usage_ratio", "Share of KV blocks that requests hold", used / max(1, load.num_blocks)
        )
        blocks = GaugeMetricFamily(
            "baton_kv_blocks", "KV blocks: used by requests, cached and not in use, or free", labels=["state"]
        )
        blocks.add_metric(["used"], used)
        blocks.add_metric(["free"], load.num_free_blocks - load.num_cached_blocks)
        blocks.add_metric(["cached"], load.num_cached_blocks)
        yield blocks
        for name, text, value in (
            ("baton_prefix_cache_queries", "Tokens looked up in the prefix cache", load.prefix_queries_total),
            ("baton_prefix_cache_hits", "Tokens found in the prefix cache", load.prefix_hits_total),
            ("baton_preemptions", "Sequences that gave their blocks up", load.num_preemptions_total),
            ("baton_dropped_events", "Late, duplicate and unknown events", load.num_dropped_events_total),
            ("baton_transfer_bytes", "KV bytes moved, resends included", transfer.num_bytes),
        ):
            yield CounterMetricFamily(name, text, value)
        failures = CounterMetricFamily("baton_transfer_failures", "KV transfers without a commit", labels=["reason"])
        for reason, number in sorted(transfer.failures.items()):
            failures.add_metric([reason], number)
        yield failures


class MetricsServer:
    """Serves /metrics in a daemon thread until closed. port 0 picks a free one."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Raises StartupError if the port can't be had."""
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), _server_class(host, port), _QuietHandler)
        except OSError as error:
            raise StartupError(f"can't serve metrics on {host}:{port}: {error.strerror}: set metrics_port") from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSE_POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Blocks for up to CLOSE_POLL_S. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """A scrape is no news."""


def _server_class(host: str, port: int) -> type[WSGIServer]:
    """http.server takes IPv4 for granted."""

    class Server(ThreadingWSGIServer):
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    return Server
