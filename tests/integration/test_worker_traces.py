"""Real services under a real router, a tiny model, a real OTLP collector: one trace from three processes' parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import structlog

from baton.worker.v1 import worker_pb2
from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.worker.loading import LoadedModel, load
from router.app import RunningRouter, serve
from tests.fakes.otlp_collector import OtlpCollector, assert_one_tree, otlp_collector
from tests.worker_harness import BOUND_S, RouterSession, RunningWorker, generate, make_spec, start_worker

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture(scope="module")
def settings(tiny_model_folder: Path, redis_url: str) -> Settings:
    return Settings(
        model=str(tiny_model_folder),
        redis_url=redis_url,
        port=0,
        block_size=8,
        kv_cache_bytes=1 << 20,
        prefill_budget_tokens=48,
        local_prefill_max_tokens=0,
        auth="anonymous",
        max_running=16,
        num_threads=1,
        landing_slots=4,
        landing_slot_bytes=64 << 10,
        shutdown_grace_s=0.2,
    )


@pytest.fixture(scope="module")
def loaded(settings: Settings) -> tuple[LoadedModel, LoadedModel]:
    return load(settings), load(settings)


@dataclass
class Services:
    collector: OtlpCollector
    prefill: RunningWorker
    decode: RunningWorker

    async def stop(self) -> None:
        """What they flush on their way down is the rest of their spans."""
        await asyncio.gather(self.prefill.stop(), self.decode.stop())


@pytest.fixture
async def services(settings: Settings, loaded: tuple[LoadedModel, LoadedModel]) -> AsyncIterator[Services]:
    with otlp_collector() as (collector, endpoint):
        traced = settings.model_copy(update={"otlp_endpoint": endpoint})
        prefill = await start_worker("prefill", traced.model_copy(update={"worker_id": "prefill-0"}), loaded[0])
        decode = await start_worker("decode", traced.model_copy(update={"worker_id": "decode-0"}), loaded[1])
        services = Services(collector, prefill, decode)
        try:
            yield services
        finally:
            await services.stop()


@asynccontextmanager
async def router(settings: Settings, endpoint: str) -> AsyncIterator[RunningRouter]:
    async with serve(settings.model_copy(update={"otlp_endpoint": endpoint, "auth": "anonymous"})) as running:
        async with asyncio.timeout(BOUND_S):
            while not running.fleet.ready:
                await running.fleet.wait_changed(0.05)
        yield running


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(3, 300), k=length)


def spec_of(services: Services, transfer_id: str, length: int, **fields) -> worker_pb2.SequenceSpec:
    spec = make_spec(transfer_id, random_prompt(length), services.prefill.info, **fields)
    spec.traceparent = TRACEPARENT
    return spec


async def test_a_request_through_router_and_both_services_is_one_trace(settings, services):
    with otlp_collector() as (of_router, endpoint):
        async with (
            router(settings, endpoint) as running,
            httpx.AsyncClient(base_url=running.http_url, timeout=30) as http,
        ):
            body = {"prompt": random_prompt(100), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
            response = await http.post("/v1/completions", json=body, headers={"x-request-id": "req-1"})
            assert response.status_code == 200, response.text
            (entry,) = (await http.get("/v1/requests/req-1/timeline")).json()["data"]
    await services.stop()
    collector = services.collector
    spans = [*of_router.spans, *collector.spans]
    root = assert_one_tree(spans)
    assert root.trace_id == entry["trace_id"]
    assert of_router.names() == [root.name, "admit", "queue", "place", "reserve"]
    assert sorted(collector.names("baton-prefill")) == ["prefill", "queue", "transfer"]
    assert sorted(collector.names("baton-decode")) == ["decode", "queue", "transfer"]
    prefill = collector.one("prefill")
    chunks = [attributes["baton.num_computed_tokens"] for _, _, attributes in prefill.events]
    assert chunks == [48, 96, 100]
    assert all(prefill.start_ns <= at <= prefill.end_ns for _, at, _ in prefill.events)
    sent, received = (collector.one("transfer", service) for service in ("baton-prefill", "baton-decode"))
    assert sent.attributes["baton.transfer_bytes"] == received.attributes["baton.transfer_bytes"] > 0
    assert sent.attributes["baton.transfer_bytes"] == entry["transfer_bytes"]
    assert (sent.kind, received.kind) == ("client", "server")
    assert {s.attributes["baton.worker_id"] for s in collector.spans} == {"prefill-0", "decode-0"}
    assert {s.attributes["baton.transfer_id"] for s in collector.spans} == {entry["attempts"][0]["transfer_id"]}
    assert {s.attributes["baton.request_id"] for s in spans} == {"req-1"}
    # One host, one wall clock: the parts lie inside the whole.
    assert all(root.start_ns <= span.start_ns <= root.end_ns for span in spans)
    phases = {(phase["phase"], phase["worker_id"]): phase for phase in entry["phases"]}
    assert phases["prefill", "prefill-0"]["duration_ms"] == pytest.approx(
        (prefill.end_ns - prefill.start_ns) / 1e6, 0.1
    )
    assert phases["decode", "decode-0"]["duration_ms"] > 0
    assert {s.error for s in spans} == {None}


async def test_an_abort_closes_the_spans_of_both_workers(services):
    spec = spec_of(services, "t", 200, max_tokens=200)
    async with RouterSession(services.prefill.info) as p, RouterSession(services.decode.info) as d:
        await d.send(reserve=worker_pb2.ReserveCommand(spec=spec))
        await d.until(lambda: "t" in d.targets)
        await p.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=d.targets["t"]))
        await d.until(lambda: len(d.legs["t"].tokens) > 3)
        await p.ended("t")
        await d.abort("t")
        await d.ended("t")
    await services.stop()
    spans = services.collector.spans
    assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, SPAN)}
    assert all(0 < span.start_ns <= span.end_ns for span in spans)
    decode = services.collector.one("decode")
    assert (decode.attributes["baton.outcome"], decode.error) == ("abort", None)
    assert decode.attributes["baton.num_output_tokens"] > 3


async def test_a_failure_and_the_retry_after_it_are_in_one_trace_and_in_both_logs(services):
    with structlog.testing.capture_logs() as lines:
        async with RouterSession(services.prefill.info) as p, RouterSession(services.decode.info) as d:
            failing = spec_of(services, "t1", 40)
            await d.send(reserve=worker_pb2.ReserveCommand(spec=failing))
            await d.until(lambda: "t1" in d.targets)
            forged = worker_pb2.TransferTarget()
            forged.CopyFrom(d.targets["t1"])
            forged.secret = bytes(16)
            await p.send(prefill=worker_pb2.PrefillCommand(spec=failing, target=forged))
            assert (await p.ended("t1")).last.HasField("error")
            await d.abort("t1")
            await d.ended("t1")
            await generate(p, d, spec_of(services, "t2", 40))
        await services.stop()
    spans = services.collector.spans
    assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, SPAN)}
    errors = [span for span in spans if span.error is not None]
    (failed,) = errors
    assert (failed.service, failed.attributes["baton.transfer_id"]) == ("baton-prefill", "t1")
    assert failed.attributes["error.type"] == "lease_lost"
    of_retry = [s.name for s in spans if s.attributes["baton.transfer_id"] == "t2"]
    assert sorted(of_retry) == ["decode", "prefill", "queue", "queue", "transfer", "transfer"]
    (line,) = [line for line in lines if line["event"] == "leg failed"]
    assert (line["request_id"], line["transfer_id"], line["trace_id"]) == ("r-t1", "t1", TRACE)
    assert line["kind"] == "lease_lost"


async def test_an_unsampled_request_and_one_without_context_leave_no_span(services):
    async with RouterSession(services.prefill.info) as p, RouterSession(services.decode.info) as d:
        unsampled = spec_of(services, "t1", 20)
        unsampled.traceparent = f"00-{TRACE}-{SPAN}-00"
        await generate(p, d, unsampled)
        await generate(p, d, make_spec("t2", random_prompt(20, 1), services.prefill.info))
        await generate(p, d, spec_of(services, "t3", 20))
    await services.stop()
    assert {span.attributes["baton.transfer_id"] for span in services.collector.spans} == {"t3"}
