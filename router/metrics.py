"""The router's Prometheus metrics, in a registry of their own. Names follow vLLM's set where the meaning is the same.

Labels have a closed set of values. Each of their children is bound once, here: what runs for every token or request
looks nothing up. docs/METRICS.md lists all of it; router/cluster_metrics.py has what is read at scrape time.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from common.errors import ErrorKind
from common.metrics import REQUEST_SECONDS_BUCKETS, SECONDS_BUCKETS, new_registry
from common.sampling_params import FinishReason
from router.cheap_histogram import CheapHistogram
from router.request import RETRYABLE
from router.request_record import Attempt, RequestRecord


class RouterMetrics:
    """Observer of requests and of writes; thread-safe."""

    def __init__(self) -> None:
        self.registry = new_registry()
        seconds, counter, children = self._seconds, self._counter, self._children
        self._ttft = seconds("time_to_first_token", "Receipt to the first token's write")
        self._itl = CheapHistogram("baton_inter_token_latency_seconds", "Between consecutive tokens' writes")
        self.registry.register(self._itl)
        self._tpot = seconds("time_per_output_token", "A request's mean inter-token latency")
        self._e2e = seconds("e2e_request_latency", "Receipt to the end", REQUEST_SECONDS_BUCKETS)
        self._queue = seconds("request_queue", "Receipt to the prefill's first step")
        self._prefill = seconds("request_prefill", "Prefill's first step to first token")
        self._transfer = seconds("transfer", "First block sent to commit")
        self._decode = seconds("request_decode", "First decode step to the end", REQUEST_SECONDS_BUCKETS)
        self._transfer_bytes = counter("transfer_bytes", "KV bytes sent from prefill to decode workers")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in workers' prefix caches")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in workers' prefix caches")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests")
        self._generation_tokens = counter("generation_tokens", "Output tokens of ended requests")
        outcomes = [*FinishReason, *ErrorKind]
        self._requests = children("requests", "Ended requests, rejected ones included", "outcome", outcomes)
        text = "Requests that were turned away before any worker was asked"
        self._rejections = children("request_rejections", text, "reason", ErrorKind)
        self._retries = children("request_retries", "Attempts repeated on other workers", "reason", sorted(RETRYABLE))
        self._moves = counter("request_moves", "Requests moved off a decode worker that had no blocks for them")
        text = "Placements by the prefix index: whether it foretold the cached tokens"
        self._predictions = children("placement_predictions", text, "result", ("exact", "over", "under"))
        text = "Cached tokens that the prefix index foretold too many (over) or too few (under)"
        self._cached_tokens_error = children("placement_cached_tokens_error", text, "direction", ("over", "under"))

    def watch(self, cluster: Collector) -> None:
        """Add what is read at scrape time."""
        self.registry.register(cluster)

    def page(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    @property
    def token_gaps(self) -> tuple[float, int]:
        """Seconds and number of all gaps between tokens so far: what admission is controlled by."""
        return self._itl.sum_s, self._itl.count

    # -- requests

    def on_retry(self, reason: ErrorKind) -> None:
        self._retries[reason].inc()

    def on_move(self) -> None:
        self._moves.inc()

    def on_refused(self, kind: ErrorKind) -> None:
        """A request that never ran."""
        self._requests[kind].inc()
        self._rejections[kind].inc()

    def on_end(self, record: RequestRecord) -> None:
        self._requests[record.outcome].inc()
        self._e2e.observe(record.e2e_s)
        self._prompt_tokens.inc(record.usage.prompt_tokens)
        self._generation_tokens.inc(record.usage.completion_tokens)
        for attempt in record.attempts:
            self._observe_placement(attempt)
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

    def _observe_placement(self, attempt: Attempt) -> None:
        predicted, found = attempt.predicted_cached_tokens, attempt.num_cached_tokens
        if predicted is None or found is None:
            return
        if predicted == found:
            self._predictions["exact"].inc()
            return
        direction = "over" if predicted > found else "under"
        self._predictions[direction].inc()
        self._cached_tokens_error[direction].inc(abs(predicted - found))

    # -- writes

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def on_tokens(self, gap_s: float, num_tokens: int) -> None:
        """num_tokens came in one write, gap_s after the one before."""
        self._itl.observe(gap_s / num_tokens, num_tokens)

    def on_last_token(self, mean_gap_s: float) -> None:
        self._tpot.observe(mean_gap_s)

    # -- making them

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
        return Histogram(f"baton_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, labels, registry=self.registry)

    def _children(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """One a value, all shown from the start: a rate over a series that first appears at 1 misses that 1."""
        family = self._counter(name, text, label)
        return {value: family.labels(str(value)) for value in values}
