"""The router's metrics: what each event adds, and what it costs."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import CollectorRegistry
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.worker.v1 import worker_pb2
from common.errors import ErrorKind
from common.kvcache.block_hash import HASH_BYTES
from router.cluster.fleet import Fleet
from router.cluster.index_audit import IndexAudit
from router.cluster.prefix_index import PAUSE_AFTER_FAILURE_S, CachedPrefix, PrefixIndex
from router.cluster.registry import ModelIdentity, RegistryWatcher
from router.cluster.worker_session import SessionState
from router.cluster_metrics import ClusterCollector
from router.metrics import RouterMetrics
from router.placer import Placer
from router.policy.transfer_rate import TransferRate
from router.request import RETRYABLE
from tests.fakes.router_parts import Bench, PlayedWorker, make_admission, make_record, make_spec, settle, until


class BenchWithMetrics(Bench):
    """Requests end in metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = RouterMetrics()
        self.dispatcher._observer = self.metrics

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def run_one(self, *, predicted: int | None, found: int) -> None:
        place = self.placer.place

        async def predicting(*args, **kwargs):
            pair = await place(*args, **kwargs)
            return type(pair)(pair.prefill, pair.decode, 20, 2, predicted)

        self.placer.place = predicting
        self.dispatcher.submit(make_spec(max_tokens=2), lambda: None)
        (prefill,), (decode,) = self.prefills, self.decodes
        await until(lambda: decode.commands_of("reserve"))
        transfer_id = decode.pop_command().reserve.spec.transfer_id
        decode.reserved(transfer_id)
        prefill.output(transfer_id, first_index=0, token_ids=[1], num_cached_tokens=found)
        timings = {"queue_s": 0.1, "prefill_s": 0.2, "transfer_s": 0.3, "transfer_bytes": 400}
        prefill.output(transfer_id, leg_ended=True, num_cached_tokens=found, timings=timings)
        decode.output(transfer_id, first_index=1, token_ids=[2], finish_reason="LENGTH", leg_ended=True)
        await settle()
        assert self.all_idle()


@pytest.mark.parametrize(
    ("predicted", "found", "result", "over", "under"),
    [(16, 16, "exact", 0, 0), (16, 0, "over", 16, 0), (0, 16, "under", 0, 16), (0, 0, "exact", 0, 0)],
)
async def test_a_placement_is_judged_by_what_its_worker_found(predicted, found, result, over, under):
    bench = BenchWithMetrics()
    await bench.run_one(predicted=predicted, found=found)
    for each in ("exact", "over", "under"):
        assert bench.value("baton_placement_predictions_total", result=each) == (each == result)
    assert bench.value("baton_placement_cached_tokens_error_total", direction="over") == over
    assert bench.value("baton_placement_cached_tokens_error_total", direction="under") == under
    assert bench.value("baton_prefix_cache_hits_total") == found
    assert bench.value("baton_requests_total", outcome="length") == 1


async def test_where_the_index_was_not_asked_there_is_no_prediction_to_judge():
    bench = BenchWithMetrics()
    await bench.run_one(predicted=None, found=16)
    assert [bench.value("baton_placement_predictions_total", result=r) for r in ("exact", "over", "under")] == [0, 0, 0]


async def test_the_placer_predicts_no_more_than_a_worker_can_reuse():
    fleet = Fleet("r", time.monotonic)
    workers = [PlayedWorker("p0", "prefill"), PlayedWorker("p1", "prefill"), PlayedWorker("d0", "decode")]
    for worker in workers:
        fleet._members[worker.session.record.worker_id] = SimpleNamespace(session=worker.session)

    async def lookup(workers, packed):
        return [CachedPrefix(2, 2), CachedPrefix(2, 2), CachedPrefix(0, 0)]

    placer = Placer(fleet, SimpleNamespace(lookup=lookup), 16, 0, TransferRate(), time.monotonic)
    predicted = [(await placer.place(n, b"h" * HASH_BYTES * 2)).predicted_cached_tokens for n in (32, 33)]
    assert predicted == [16, 32], "a prompt's last token is always computed"
    assert (await placer.place(5, b"")).predicted_cached_tokens is None, "shorter than a block: nothing was asked"


def test_every_kind_of_error_and_every_reason_to_retry_can_be_counted():
    metrics = RouterMetrics()
    for kind in ErrorKind:
        metrics.on_refused(kind)
        value = metrics.registry.get_sample_value
        assert value("baton_request_rejections_total", {"reason": str(kind)}) == 1
        assert value("baton_requests_total", {"outcome": str(kind)}) == 1
    for kind in RETRYABLE:
        metrics.on_retry(kind)
        assert metrics.registry.get_sample_value("baton_request_retries_total", {"reason": str(kind)}) == 1


async def test_nothing_on_a_requests_way_looks_a_label_up(monkeypatch):
    bench = BenchWithMetrics()

    def refuse(*_, **__):
        raise AssertionError("a label look-up")

    for family in (Counter, Gauge, Histogram):
        monkeypatch.setattr(family, "labels", refuse)
    await bench.run_one(predicted=16, found=0)
    bench.metrics.on_first_token(0.1)
    bench.metrics.on_tokens(0.1, 5)
    bench.metrics.on_last_token(0.02)
    bench.metrics.on_retry(ErrorKind.LEASE_LOST)
    bench.metrics.on_refused(ErrorKind.OVERLOADED)
    assert bench.value("baton_inter_token_latency_seconds_count") == 5
    assert bench.value("baton_inter_token_latency_seconds_sum") == pytest.approx(0.1)


class Cluster:
    """A collector over a fleet whose sessions are played, and over a Redis that can be away."""

    def __init__(self) -> None:
        self.now = 100.0
        self.down = False
        clock = lambda: self.now  # noqa: E731
        self.fleet = Fleet("r", time.monotonic)
        self.watcher = RegistryWatcher(self, "c", ModelIdentity("f", 16), lambda _: None, clock)
        dispatcher = SimpleNamespace(num_running=2, num_waiting=3, admission=make_admission(8))
        self.index = PrefixIndex(self, "c", clock)
        self.registry = CollectorRegistry()
        audit = IndexAudit(self, "c", self.fleet)
        self.registry.register(ClusterCollector(self.fleet, dispatcher, self.watcher, self.index, audit, clock))

    async def smembers(self, key):
        return self._answer(set())

    async def evalsha(self, *_):
        return self._answer([1, 1])

    def _answer(self, value):
        if self.down:
            raise RedisConnectionError("down")
        return value

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def test_the_registrys_age_grows_until_a_poll_succeeds():
    cluster = Cluster()
    cluster.now += 7
    cluster.down = True
    await cluster.watcher.poll()
    assert cluster.value("baton_registry_age_seconds") == 7
    assert cluster.value("baton_registry_poll_failures_total") == 1
    cluster.down = False
    await cluster.watcher.poll()
    assert cluster.value("baton_registry_age_seconds") == 0
    assert cluster.value("baton_requests_waiting") == 3
    assert cluster.value("baton_queue_requests", priority_class="default") == 0
    assert cluster.value("baton_requests_running") == 2


async def test_lookups_are_counted_by_what_came_of_them():
    cluster = Cluster()
    await cluster.index.lookup([make_record("a", "decode")], b"h" * 16)
    await cluster.index.lookup([make_record("a", "decode")], b"")  # nothing to look up
    cluster.down = True
    for _ in range(3):
        await cluster.index.lookup([make_record("a", "decode")], b"h" * 16)
    cluster.now += PAUSE_AFTER_FAILURE_S
    await cluster.index.lookup([make_record("a", "decode")], b"h" * 16)
    outcomes = {
        o: cluster.value("baton_prefix_index_lookups_total", outcome=o) for o in ("answered", "failed", "skipped")
    }
    assert outcomes == {"answered": 1, "failed": 2, "skipped": 2}


async def test_a_workers_label_goes_with_it_and_its_counts_stay(monkeypatch):
    monkeypatch.setattr("router.cluster.worker_session.WorkerSession.run", lambda self: asyncio.sleep(3600))
    cluster = Cluster()
    cluster.fleet.apply_records({"d0": make_record("d0", "decode")})
    session = cluster.fleet.session("d0")
    assert cluster.value("baton_workers", role="decode", state="dialling") == 1
    session._state = SessionState.READY
    session.num_events["connected"] += 1
    worker = PlayedWorker.__new__(PlayedWorker)
    worker.session = session
    load = worker_pb2.LoadReport(num_blocks=100, num_free_blocks=25)
    session._on_step(worker_pb2.StepOutput(load=load))
    worker.output("unknown", token_ids=[1])
    assert cluster.value("baton_kv_cache_usage_ratio", worker_id="d0", role="decode") == 0.75
    assert cluster.value("baton_workers", role="decode", state="ready") == 1
    await cluster.fleet.close()
    assert cluster.value("baton_kv_cache_usage_ratio", worker_id="d0", role="decode") is None
    assert [cluster.value("baton_workers", role="decode", state=s) for s in ("dialling", "ready", "draining")] == [
        0
    ] * 3
    assert cluster.value("baton_worker_session_events_total", role="decode", event="connected") == 1
    assert cluster.value("baton_worker_session_events_total", role="decode", event="lost") == 1
    assert cluster.value("baton_worker_session_events_total", role="prefill", event="lost") == 0
    assert cluster.value("baton_late_frames_total") == 1
