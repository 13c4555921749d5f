"""A worker's Prometheus metrics, in a registry of its own: nothing is global, nothing starts a server on import.

State (running, waiting, blocks, totals) is read at scrape time from the engine's last load report and from the
transfers' statistics; a step's figures are observed once a step, durations once a leg, from its own timings. Labels
have a closed set of values, whose children are bound once. docs/METRICS.md lists all of it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from common.engine.messages import EngineNews, LegOutput, StepShape
from common.errors import ErrorKind, StartupError
from common.metrics import RATIO_BUCKETS, REQUEST_SECONDS_BUCKETS, SECONDS_BUCKETS, SEQUENCES_BUCKETS, TOKENS_BUCKETS
from common.registry import Role
from common.rpc.worker_messages import LoadReport, Timings
from common.sampling_params import FinishReason
from common.worker.info import WorkerInfo

CLOSE_POLL_S: Final = 0.05
# A prefill leg that did its part and goes on elsewhere.
HANDED_OVER: Final = "handed_over"


class WorkerMetrics:
    """Registers in `registry`. transfers: the collectors of this worker's side of the KV transfers."""

    def __init__(self, registry: CollectorRegistry, info: WorkerInfo, transfers: Iterable[Collector]) -> None:
        self._load = LoadReport(num_free_blocks=info.num_blocks, num_blocks=info.num_blocks)
        registry.register(_StateCollector(info.role, lambda: self._load))
        for collector in transfers:
            registry.register(collector)
        self._steps = _StepMetrics(registry, info.role)
        self._legs = _LegMetrics(registry, info.role)
        _set_info(registry, info)

    def on_news(self, news: EngineNews) -> None:
        """Once an engine round."""
        self._load = news.load
        if news.step_s is not None and news.step_shape is not None:
            self._steps.observe(news.step_s, news.step_shape)
        for owner_news in news.by_owner.values():
            for output in owner_news.outputs:
                if output.leg_ended:
                    self._legs.observe(output)


class _StepMetrics:
    def __init__(self, registry: CollectorRegistry, role: Role) -> None:
        text = "One engine step: prefill, decode, or both in one (mixed)"
        seconds = Histogram("baton_step_seconds", text, ["phase"], buckets=SECONDS_BUCKETS, registry=registry)
        text = "Tokens that one step computed, of each phase that it had any of"
        tokens = Histogram("baton_step_tokens", text, ["phase"], buckets=TOKENS_BUCKETS, registry=registry)
        text = "Sequences that one step computed"
        self._batch = Histogram("baton_step_batch_size", text, buckets=SEQUENCES_BUCKETS, registry=registry)
        # What a prefill worker can't have is not shown there.
        phases = ("prefill",) if role == "prefill" else ("prefill", "decode", "mixed")
        self._seconds = {phase: seconds.labels(phase) for phase in phases}
        self._tokens = {phase: tokens.labels(phase) for phase in phases if phase != "mixed"}

    def observe(self, step_s: float, shape: StepShape) -> None:
        self._batch.observe(shape.num_sequences)
        if not shape.num_decode_tokens:
            self._seconds["prefill"].observe(step_s)
        elif not shape.num_prefill_tokens:
            self._seconds["decode"].observe(step_s)
        else:
            self._seconds["mixed"].observe(step_s)
        if shape.num_prefill_tokens:
            self._tokens["prefill"].observe(shape.num_prefill_tokens)
        if shape.num_decode_tokens:
            self._tokens["decode"].observe(shape.num_decode_tokens)


class _LegMetrics:
    def __init__(self, registry: CollectorRegistry, role: Role) -> None:
        def seconds(name: str, text: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._queue_s = seconds("baton_request_queue_seconds", "Arrival to first step, or to a reservation")
        self._prefill_s = seconds("baton_request_prefill_seconds", "First step to first token")
        self._transfer_s = seconds("baton_transfer_seconds", "First block sent to commit")
        self._overlap = self._decode_s = None
        if role == "prefill":
            name, text = "baton_transfer_overlap_ratio", "Part of a transfer's time that lay before the first token"
            self._overlap = Histogram(name, text, buckets=RATIO_BUCKETS, registry=registry)
        else:
            text = "First decode step to the end"
            self._decode_s = seconds("baton_request_decode_seconds", text, REQUEST_SECONDS_BUCKETS)
        regular = (HANDED_OVER,) if role == "prefill" else ()
        legs = Counter("baton_legs", "Requests that have ended at this worker", ["outcome"], registry=registry)
        self._legs = {outcome: legs.labels(str(outcome)) for outcome in (*regular, *FinishReason, *ErrorKind)}

    def observe(self, output: LegOutput) -> None:
        """output: a leg's last."""
        self._legs[_outcome(output)].inc()
        if output.timings is None:
            return
        timings: Timings = output.timings
        self._queue_s.observe(timings.queue_s)
        if timings.prefill_s:
            self._prefill_s.observe(timings.prefill_s)
        if timings.transfer_s:
            self._transfer_s.observe(timings.transfer_s)
            if self._overlap is not None:
                self._overlap.observe(timings.overlap_s / timings.transfer_s)
        if timings.decode_s and self._decode_s is not None:
            self._decode_s.observe(timings.decode_s)


def _outcome(output: LegOutput) -> str:
    if output.error is not None:
        return output.error.kind
    return HANDED_OVER if output.finish_reason is None else output.finish_reason


class _StateCollector(Collector):
    """What is a state or a total already, read when somebody asks."""

    def __init__(self, role: Role, load: Callable[[], LoadReport]) -> None:
        self._role = role
        self._load = load

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        used = load.num_blocks - load.num_free_blocks
        yield GaugeMetricFamily("baton_requests_running", "Requests that hold blocks", load.num_running)
        yield GaugeMetricFamily("baton_requests_waiting", "Requests that wait for blocks", load.num_waiting)
        yield GaugeMetricFamily(
            "baton_queued_prefill_tokens", "Accepted tokens still to be computed here", load.queued_prefill_tokens
        )
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
        text = "Tokens that the chunks of the next step may compute"
        yield GaugeMetricFamily("baton_chunk_budget_tokens", text, load.chunk_budget_tokens)
        yield from _host_tier(load)
        totals = [
            ("baton_prefix_cache_queries", "Tokens looked up in the prefix cache", load.prefix_queries_total),
            ("baton_prefix_cache_hits", "Tokens found in the prefix cache", load.prefix_hits_total),
            ("baton_prefix_cache_host_hits", "Of these, brought back from host memory", load.prefix_host_hits_total),
            ("baton_dropped_events", "Late, duplicate and unknown events", load.num_dropped_events_total),
        ]
        if self._role == "decode":
            totals += [
                ("baton_preemptions", "Times that a sequence gave its blocks up", load.num_preemptions_total),
                ("baton_preemptions_swapped", "Of these, with KV kept in host memory", load.num_swapped_total),
                ("baton_preemptions_offered", "Of these, offered to another worker", load.num_offered_total),
            ]
        for name, text, value in totals:
            yield CounterMetricFamily(name, text, value)


def _host_tier(load: LoadReport) -> Iterable[Metric]:
    blocks = GaugeMetricFamily("baton_kv_host_blocks", "Blocks of the host tier: used or free", labels=["state"])
    blocks.add_metric(["used"], load.num_used_host_blocks)
    blocks.add_metric(["free"], load.num_host_blocks - load.num_used_host_blocks)
    yield blocks
    text = "Blocks copied from the pool to host memory (save), and back (load)"
    copies = CounterMetricFamily("baton_kv_host_copied_blocks", text, labels=["direction"])
    copies.add_metric(["save"], load.num_host_saves_total)
    copies.add_metric(["load"], load.num_host_loads_total)
    yield copies


def _set_info(registry: CollectorRegistry, info: WorkerInfo) -> None:
    model = {"role": info.role, "model_name": info.model_name, "dtype": info.dtype}
    model |= {"model_fingerprint": info.model_fingerprint, "max_model_len": str(info.max_model_len)}
    cache = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
    for name, text, labels in (
        ("baton_model_info", "What this worker runs; always 1", model),
        ("baton_cache_config_info", "Its KV cache; always 1", cache),
    ):
        Gauge(name, text, list(labels), registry=registry).labels(**labels).set(1)


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
