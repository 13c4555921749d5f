"""A timeout, however it is given, ends a request at whichever stage it has come to; every hop knows what is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from router.gateway import grpc_api
from tests.fakes.router_cluster import mock_cluster, streamed
from tests.fakes.tiny_folder import make_tiny_folder

TIMEOUT_S = 0.15


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


@pytest.mark.parametrize("stage", ["reservations", "first_tokens"])
@pytest.mark.parametrize("way", ["field", "header"])
async def test_before_the_first_token_it_is_a_504_and_both_workers_let_go(folder, stage, way):
    async with mock_cluster(folder) as cluster:
        worker = cluster.decodes[0] if stage == "reservations" else cluster.prefills[0]
        getattr(worker, stage).close()
        body = {"prompt": "hello", "max_tokens": 4, **({"timeout": TIMEOUT_S} if way == "field" else {})}
        headers = {"x-request-timeout": str(TIMEOUT_S)} if way == "header" else {}
        response = await cluster.http.post("/v1/completions", json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        for each in cluster.workers:
            await each.until(lambda each=each: not each.live)
            assert all(0 < spec.timeout_ms <= TIMEOUT_S * 1000 for spec in each.seen)
        cluster.assert_nothing_left()


async def test_in_mid_stream_it_is_an_error_event(folder):
    async with mock_cluster(folder) as cluster:
        cluster.decodes[0].steps.close()
        async with streamed(cluster, max_tokens=4, timeout=TIMEOUT_S) as events:
            await events.rest()
        assert events.events[-1]["error"]["code"] == "deadline_exceeded"
        await cluster.decodes[0].until(lambda: not cluster.decodes[0].live)
        cluster.assert_nothing_left()


async def test_in_the_queue_it_is_a_504_that_no_worker_heard_of(folder):
    async with mock_cluster(folder, settings={"max_model_len": 512}) as cluster:
        cluster.prefills[0].first_tokens.close()
        bodies = [{"prompt": [5 + i] * 500, "max_tokens": 1, "timeout": 20} for i in range(12)]
        running = [asyncio.create_task(cluster.http.post("/v1/completions", json=body)) for body in bodies]
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 12, "a queue")
        response = await cluster.http.post("/v1/completions", json={"prompt": "hello", "timeout": TIMEOUT_S})
        assert response.status_code == 504
        assert {spec.num_prompt_tokens for spec in cluster.decodes[0].seen} <= {500}
        cluster.prefills[0].first_tokens.open()
        assert {response.status_code for response in await asyncio.gather(*running)} == {200}
        cluster.assert_nothing_left()


async def test_a_calls_own_deadline_is_the_requests(folder):
    async with mock_cluster(folder) as cluster:
        cluster.prefills[0].first_tokens.close()
        async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(timeout=1.0)
            start = inference_pb2.StartGeneration(request_id="a", text="hello")
            await call.write(inference_pb2.GenerateRequest(start=start))
            await cluster.prefills[0].until(lambda: cluster.prefills[0].seen)
            assert 0 < cluster.prefills[0].seen[0].timeout_ms <= 1100  # gRPC rounds up on its way
            call.cancel()
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the end")


async def test_a_grpc_client_that_takes_nothing_loses_its_stream(folder, monkeypatch):
    monkeypatch.setattr(grpc_api, "WRITE_TIMEOUT_S", 0.1)
    stuck = asyncio.Event()

    class Stream(grpc_api._GenerateStream):
        def __init__(self, state, context, tenant) -> None:
            super().__init__(state, context, tenant)
            self._context = _Deaf(context, stuck)

    monkeypatch.setattr(grpc_api, "_GenerateStream", Stream)
    async with mock_cluster(folder) as cluster:
        async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate()
            start = inference_pb2.StartGeneration(request_id="a", text="hello")
            await call.write(inference_pb2.GenerateRequest(start=start))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 10)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert stuck.is_set()
        cluster.assert_nothing_left()


class _Deaf:
    """A call whose client reads no frame."""

    def __init__(self, context, stuck: asyncio.Event) -> None:
        self._context = context
        self._stuck = stuck

    def __getattr__(self, name):
        return getattr(self._context, name)

    async def write(self, frame) -> None:
        self._stuck.set()
        await asyncio.Event().wait()
