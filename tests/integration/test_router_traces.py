"""A whole router before mock workers, with a real OTLP collector behind it: one trace a request, and its timeline."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import pytest
import structlog

from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from common import tracing
from tests.fakes.mock_worker import Failure
from tests.fakes.otlp_collector import Collected, OtlpCollector, assert_one_tree, otlp_collector
from tests.fakes.router_cluster import MockCluster, mock_cluster, streamed
from tests.fakes.tiny_folder import make_tiny_folder

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
OWN_PARTS = ["admit", "place", "queue", "reserve"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


def traced(endpoint: str, **settings: object) -> dict[str, object]:
    return {"otlp_endpoint": endpoint, **settings}


async def collected(cluster: MockCluster, collector: OtlpCollector) -> list[Collected]:
    """All spans: what the router's stop flushes is the rest."""
    await cluster.stop_router()
    return collector.spans


async def timeline(cluster: MockCluster, request_id: str) -> dict:
    response = await cluster.http.get(f"/v1/requests/{request_id}/timeline")
    assert response.status_code == 200, response.text
    (entry,) = response.json()["data"]
    return entry


async def test_a_request_is_one_trace_under_the_clients_span(folder):
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, cached_tokens=2, settings=traced(endpoint)) as cluster:
            headers = {"traceparent": TRACEPARENT, "x-request-id": "req-1"}
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.5, "top_k": 3}
            response = await cluster.http.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 200
            usage = response.json()["usage"]
            spans = await collected(cluster, collector)
            root = assert_one_tree(spans, SPAN)
            assert sorted(span.name for span in spans if span is not root) == OWN_PARTS
            for worker in cluster.workers:
                assert [spec.traceparent for spec in worker.seen] == [f"00-{TRACE}-{root.span_id}-01"]
            model = cluster.router.model.name
    assert (root.name, root.kind, root.service, root.error) == (f"chat {model}", "server", "baton-router", None)
    assert root.resource["service.namespace"] == "baton"
    time_to_first_chunk = root.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < time_to_first_chunk < (root.end_ns - root.start_ns) / 1e9
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "server.address": "127.0.0.1",
        "baton.request_id": "req-1",
        "baton.outcome": "length",
        "baton.attempts": 1,
    }
    reserve = collector.one("reserve")
    assert (reserve.kind, reserve.attributes["baton.worker_id"]) == ("client", "decode-0")
    assert collector.one("place").attributes["baton.placed_workers"] == ["prefill-0", "decode-0"]
    assert all(root.start_ns <= s.start_ns and s.end_ns <= root.end_ns for s in spans)


async def test_a_retry_is_a_migrate_span_in_the_same_trace(folder):
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, prefill=2, decode=2, settings=traced(endpoint)) as cluster:
            for decode in cluster.decodes:
                decode.failures.append(Failure("LEASE_LOST", after_tokens=2))
            await cluster.complete(max_tokens=5)
            seen = [spec.traceparent for worker in cluster.workers for spec in worker.seen]
            spans = await collected(cluster, collector)
    root = assert_one_tree(spans)
    assert set(seen) == {f"00-{root.trace_id}-{root.span_id}-01"}
    assert collector.names() == [root.name, "admit", "queue", "place", "reserve", "migrate", "place", "reserve"]
    migrate = collector.one("migrate")
    assert migrate.attributes["error.type"] == "lease_lost"
    places = [s.attributes["baton.placed_workers"] for s in spans if s.name == "place"]
    assert migrate.attributes["baton.failed_workers"] == sorted(places[0])
    assert not set(places[0]) & set(places[1])
    assert migrate.attributes["baton.num_output_tokens"] == 3
    assert (root.error, root.attributes["baton.attempts"]) == (None, 2)
    assert [s.attributes["baton.attempt"] for s in spans if s.name == "reserve"] == [1, 2]


async def test_a_failed_request_ends_its_trace_with_an_error_and_its_kind(folder):
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, settings=traced(endpoint)) as cluster:
            cluster.decodes[0].failures.append(Failure("INTERNAL"))
            response = await cluster.http.post("/v1/completions", json={"prompt": "hello"})
            assert response.status_code == 500
            spans = await collected(cluster, collector)
    root = assert_one_tree(spans)
    assert root.error == "as the test asked"
    assert root.attributes["error.type"] == root.attributes["baton.outcome"] == "internal_error"
    assert root.attributes["baton.phase"] == "reserving"
    assert "gen_ai.response.finish_reasons" not in root.attributes
    assert collector.names() == [root.name, "admit", "queue", "place", "reserve"]
    assert collector.one("reserve").error == root.error, "the part that failed"


async def test_a_client_that_leaves_ends_its_trace_without_an_error_of_ours(folder):
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, settings=traced(endpoint)) as cluster:
            cluster.decodes[0].steps.close()
            async with streamed(cluster, max_tokens=100) as events:
                await events.next()
            await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the abort")
            spans = await collected(cluster, collector)
    root = assert_one_tree(spans)
    assert (root.error, root.attributes["error.type"]) == (None, "cancelled")
    assert root.attributes["baton.phase"] == "decoding"
    assert root.attributes["gen_ai.usage.output_tokens"] == 1


async def test_a_refused_request_is_a_trace_of_its_own(folder):
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, settings=traced(endpoint)) as cluster:
            headers = {"traceparent": TRACEPARENT, "x-request-id": "req-1"}
            body = {"prompt": "hello", "max_tokens": -1}
            assert (await cluster.http.post("/v1/completions", json=body, headers=headers)).status_code == 400
            spans = await collected(cluster, collector)
    root = assert_one_tree(spans, SPAN)
    assert (root.error, root.attributes["error.type"]) == (None, "invalid_request")
    assert collector.names() == [root.name, "admit"]


async def test_prompts_of_one_http_request_share_its_trace_with_a_root_each(folder):
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, settings=traced(endpoint)) as cluster:
            body = {"prompt": ["one", "two", "three"], "max_tokens": 2}
            headers = {"traceparent": TRACEPARENT, "x-request-id": "req-1"}
            assert (await cluster.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            response = await cluster.http.get("/v1/requests/req-1/timeline")
            assert [entry["trace_id"] for entry in response.json()["data"]] == [TRACE] * 3
            spans = await collected(cluster, collector)
    roots = [span for span in spans if span.parent_id == SPAN]
    assert len(roots) == len({root.span_id for root in roots}) == 3
    for root in roots:
        assert_one_tree([root, *(span for span in spans if span.parent_id == root.span_id)], SPAN)


async def test_grpc_metadata_and_the_sampling_decision_are_the_clients(folder):
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, settings=traced(endpoint, trace_sample_ratio=0.0)) as cluster:
            for flags, request_id in (("01", "traced"), ("00", "untraced")):
                async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
                    metadata = (("traceparent", f"00-{TRACE}-{SPAN}-{flags}"),)
                    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(metadata=metadata)
                    sampling = inference_pb2.SamplingParams(max_tokens=2)
                    start = inference_pb2.StartGeneration(request_id=request_id, text="hello", sampling=sampling)
                    await call.write(inference_pb2.GenerateRequest(start=start))
                    await call.done_writing()
                    while await call.read() is not grpc.aio.EOF:
                        pass
            await cluster.complete(max_tokens=2)  # nobody decided, and the ratio is 0
            assert (await timeline(cluster, "untraced"))["trace_id"] == TRACE
            passed_on = [spec.traceparent for spec in cluster.decodes[0].seen]
            spans = await collected(cluster, collector)
    root = assert_one_tree(spans, SPAN)
    assert root.attributes["baton.request_id"] == "traced"
    assert passed_on == [f"00-{TRACE}-{root.span_id}-01", f"00-{TRACE}-{SPAN}-00", ""]


async def test_a_collector_that_is_away_harms_no_request_and_is_one_line(folder):
    with otlp_collector() as (_, endpoint):
        pass  # it listened there, once
    with structlog.testing.capture_logs() as lines:
        async with mock_cluster(folder, settings=traced(endpoint)) as cluster:
            for _ in range(20):
                await cluster.complete(max_tokens=3)
            await cluster.stop_router()
    assert len([line for line in lines if "traces" in line["event"]]) <= 1
    assert not [line for line in lines if line["log_level"] == "error"]


async def test_off_means_no_span_no_context_and_no_opentelemetry(folder, monkeypatch):
    class Forbidden:
        def find_spec(self, name, path=None, target=None):
            assert not name.startswith(("opentelemetry", "common.otlp")), f"{name} is imported though tracing is off"

    def forbidden(*args, **kwargs):
        raise AssertionError("made though tracing is off")

    for name in [name for name in sys.modules if name.startswith(("opentelemetry", "common.otlp"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Forbidden(), *sys.meta_path])
    for kind in (tracing.Span, tracing.SpanEvent, tracing.TraceContext):
        monkeypatch.setattr(kind, "__init__", forbidden)
    async with mock_cluster(folder, prefill=2, decode=2) as cluster:
        for decode in cluster.decodes:
            decode.failures.append(Failure("LEASE_LOST", after_tokens=2))
        await cluster.complete(max_tokens=5)
        assert {spec.traceparent for worker in cluster.workers for spec in worker.seen} == {""}


async def test_without_a_sink_the_clients_trace_still_reaches_logs_and_workers(folder):
    with structlog.testing.capture_logs() as lines:
        async with mock_cluster(folder) as cluster:
            cluster.decodes[0].failures.append(Failure("INTERNAL"))
            await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": TRACEPARENT})
            assert [spec.traceparent for spec in cluster.decodes[0].seen] == [TRACEPARENT]
    (line,) = [line for line in lines if line["event"] == "request failed"]
    assert (line["trace_id"], line["log_level"], line["workers"]) == (TRACE, "error", ["prefill-0", "decode-0"])


# -- timelines


async def test_a_running_requests_timeline_shows_where_it_is_and_the_ended_ones_what_became_of_it(folder):
    async with mock_cluster(folder, cached_tokens=2) as cluster:
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        gates = [
            ("reserving", decode.reservations, lambda: decode.seen),
            ("prefilling", prefill.first_tokens, lambda: prefill.seen),
            ("decoding", decode.steps, lambda: True),
        ]
        for _, gate, _ in gates:
            gate.close()
        prefill.last_frames.close()
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        headers = {"x-request-id": "a.b:c"}
        answer = asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=headers))
        for state, gate, reached in gates:
            await decode.until(lambda: decode.seen)
            await prefill.until(reached)
            if state == "decoding":
                run = cluster.router.dispatcher.find("a.b:c")[0]
                await cluster.until(lambda run=run: run.state == "decoding", "the first token")
            entry = await timeline(cluster, "a.b:c")
            assert (entry["state"], entry["outcome"], entry["error"]) == (state, None, None)
            open_phases = [phase["phase"] for phase in entry["phases"] if phase["duration_ms"] is None]
            # Of a first token alone nobody can say yet whether anything is to be decoded.
            assert open_phases == {"reserving": ["reserve"], "prefilling": ["prefill"], "decoding": []}[state]
            gate.open()
        prefill.last_frames.open()
        assert (await answer).status_code == 200
        entry = await timeline(cluster, "a.b:c")
    assert (entry["state"], entry["outcome"], entry["trace_id"]) == ("finished", "length", None)
    assert (entry["cached_tokens"], entry["output_tokens"], entry["transfer_bytes"]) == (2, 3, 4096)
    assert entry["attempts"][0]["prefill_worker"] == "prefill-0"
    by_name = {(phase["phase"], phase["worker_id"]): phase for phase in entry["phases"]}
    assert by_name["prefill", "prefill-0"]["duration_ms"] == pytest.approx(2.0)
    assert by_name["transfer", "prefill-0"]["duration_ms"] == pytest.approx(3.0)
    assert by_name["decode", "decode-0"]["duration_ms"] <= 4.0
    for phase in entry["phases"]:
        assert 0 <= phase["start_ms"] <= phase["start_ms"] + phase["duration_ms"] <= entry["elapsed_ms"] + 0.01


async def test_a_failed_and_retried_requests_timeline_names_workers_and_causes(folder):
    async with mock_cluster(folder, prefill=1, decode=1) as cluster:
        cluster.decodes[0].failures += [Failure("CORRUPT_KV") for _ in range(3)]
        response = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r"})
        assert response.status_code == 503
        entry = await timeline(cluster, "r")
    assert (entry["state"], entry["outcome"], entry["retries"]) == ("failed", "no_worker", 2)
    assert [attempt["error"]["kind"] for attempt in entry["attempts"]] == ["corrupt_kv"] * 3
    assert [phase["attempt"] for phase in entry["phases"] if phase["phase"] == "migrate"] == [2, 3]


async def test_an_unknown_id_is_an_error_body_and_ids_are_forgotten_in_order(folder):
    async with mock_cluster(folder, settings={"timeline_entries": 2}) as cluster:
        for request_id in ("a", "b", "c"):
            await cluster.http.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers={"x-request-id": request_id}
            )
        for request_id in ("a", "never", "x/y"):
            response = await cluster.http.get(f"/v1/requests/{request_id}/timeline")
            assert response.status_code == 404
            error = response.json()["error"]
            assert error["code"] == "not_found"
            assert repr(request_id) in error["message"]
            assert response.headers["x-request-id"]
        for request_id in ("b", "c"):
            assert (await timeline(cluster, request_id))["request_id"] == request_id


async def test_a_spans_headers_come_from_the_environment(folder, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=baton")
    with otlp_collector() as (collector, endpoint):
        async with mock_cluster(folder, settings=traced(endpoint)) as cluster:
            await cluster.complete(max_tokens=2)
            await collected(cluster, collector)
    assert collector.headers["x-team"] == "baton"
