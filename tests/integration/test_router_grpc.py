"""The public gRPC API over a real channel: many requests on one stream, each with exactly one end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.common.v1 import common_pb2
from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from common.model.tokenizer import Tokenizer
from tests.fakes.mock_worker import Failure, scripted_token
from tests.fakes.router_cluster import MockCluster, mock_cluster
from tests.fakes.tiny_folder import make_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


def start(request_id: str, text: str = "hello", **fields) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(**fields.pop("sampling", {"max_tokens": 5}))
    prompt = {"text": text} if not fields.keys() & {"tokens", "chat"} else {}
    frame = inference_pb2.StartGeneration(request_id=request_id, sampling=sampling, **prompt, **fields)
    return inference_pb2.GenerateRequest(start=frame)


def abort(request_id: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(abort=inference_pb2.AbortGeneration(request_id=request_id))


class Client:
    """One Generate stream."""

    def __init__(self, cluster: MockCluster) -> None:
        self.channel = grpc.aio.insecure_channel(cluster.router.grpc_address)
        self.call = inference_pb2_grpc.InferenceServiceStub(self.channel).Generate()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.text: dict[str, str] = defaultdict(str)
        self.ends: dict[str, list] = defaultdict(list)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_) -> None:
        self.call.cancel()
        await self.channel.close()

    async def send(self, *frames: inference_pb2.GenerateRequest) -> None:
        for frame in frames:
            await self.call.write(frame)

    async def read(self) -> inference_pb2.GenerateResponse | None:
        frame = await asyncio.wait_for(self.call.read(), 10)
        if frame is grpc.aio.EOF:
            return None
        if frame.HasField("chunk"):
            assert frame.chunk.first_index == len(self.tokens[frame.request_id])
            self.tokens[frame.request_id] += frame.chunk.token_ids
            self.text[frame.request_id] += frame.chunk.text
        else:
            self.ends[frame.request_id].append(frame.finished if frame.HasField("finished") else frame.error)
        return frame

    async def rest(self) -> None:
        while await self.read() is not None:
            pass

    async def until_end_of(self, request_id: str) -> None:
        while not self.ends[request_id]:
            assert await self.read() is not None


async def test_several_requests_interleave_and_end_once_each(folder):
    tokenizer = Tokenizer(folder)
    async with mock_cluster(folder, cached_tokens=2) as cluster, Client(cluster) as client:
        chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
        tokens = inference_pb2.TokenPrompt(token_ids=[5, 6, 7])
        await client.send(start("a"), start("b", tokens=tokens), start("c", chat=chat, sampling={"max_tokens": 30}))
        await client.call.done_writing()
        await client.rest()
        prompt = tokenizer.encode("hello", True)
        assert client.tokens["a"] == [scripted_token(prompt, i) for i in range(5)]
        assert client.text["a"] == tokenizer.decode(client.tokens["a"])
        assert client.tokens["b"] == [scripted_token([5, 6, 7], i) for i in range(5)]
        assert len(client.tokens["c"]) == 30
        assert {request_id: len(ends) for request_id, ends in client.ends.items()} == {"a": 1, "b": 1, "c": 1}
        finished = client.ends["a"][0]
        assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
        usage = finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(prompt), 5, 2)
        assert await client.call.code() == grpc.StatusCode.OK
        cluster.assert_nothing_left()


async def test_an_abort_ends_one_request_and_no_other(folder):
    async with mock_cluster(folder) as cluster, Client(cluster) as client:
        cluster.decodes[0].steps.close()
        await client.send(start("a", sampling={"max_tokens": 50}), start("b", sampling={"max_tokens": 50}))
        while not (client.tokens["a"] and client.tokens["b"]):
            await client.read()
        await client.send(abort("a"), abort("unknown"))
        await client.until_end_of("a")
        assert client.ends["a"][0].kind == common_pb2.ERROR_KIND_CANCELLED
        await cluster.decodes[0].until(lambda: len(cluster.decodes[0].live) == 1)
        cluster.decodes[0].steps.open()
        await client.until_end_of("b")
        assert len(client.tokens["b"]) == 50
        await client.send(start("a"))
        client.ends["a"].clear()
        client.tokens["a"].clear()
        await client.until_end_of("a")
        assert len(client.tokens["a"]) == 5, "an ended id is free again"
        cluster.assert_nothing_left()


async def test_cancelling_the_stream_aborts_all_that_runs_on_it(folder):
    async with mock_cluster(folder) as cluster:
        cluster.decodes[0].steps.close()
        async with Client(cluster) as client:
            await client.send(start("a", sampling={"max_tokens": 50}), start("b", sampling={"max_tokens": 50}))
            while not (client.tokens["a"] and client.tokens["b"]):
                await client.read()
        await cluster.decodes[0].until(lambda: len(cluster.decodes[0].aborted) == 2)
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the router to forget them")
        cluster.assert_nothing_left()


BAD = [
    (start("", "x"), "request_id"),
    (start("e", ""), "text"),
    (start("e", sampling={"temperature": 3.0}), "temperature"),
    (start("e", sampling={"max_tokens": 0}), "max_tokens"),
    (start("e", sampling={"stop": [""]}), "stop"),
    (start("e", tokens=inference_pb2.TokenPrompt(token_ids=[10**6])), "tokens"),
    (start("e", tokens=inference_pb2.TokenPrompt(token_ids=[5] * 512)), "tokens"),
    (start("e", chat=inference_pb2.ChatPrompt()), "chat"),
    (start("e", model="nope"), "model"),
    (inference_pb2.GenerateRequest(start=inference_pb2.StartGeneration(request_id="e")), "prompt"),
    (inference_pb2.GenerateRequest(), ""),
]


async def test_a_bad_request_is_an_error_frame_and_the_stream_goes_on(folder):
    async with mock_cluster(folder) as cluster, Client(cluster) as client:
        for frame, param in BAD:
            await client.send(frame)
            await client.until_end_of(frame.start.request_id)
            error = client.ends.pop(frame.start.request_id)[0]
            assert error.param == param, error
            assert error.message
        await client.send(start("good"))
        await client.until_end_of("good")
        assert len(client.tokens["good"]) == 5


async def test_a_repeated_id_is_refused_without_harm_to_the_first(folder):
    async with mock_cluster(folder) as cluster, Client(cluster) as client:
        cluster.decodes[0].steps.close()
        await client.send(start("a", sampling={"max_tokens": 9}), start("a", "other"))
        await client.until_end_of("a")
        assert client.ends["a"][0].param == "request_id"
        cluster.decodes[0].steps.open()
        await client.call.done_writing()
        await client.rest()
        assert len(client.tokens["a"]) == 9
        assert client.ends["a"][1].usage.completion_tokens == 9


async def test_a_failed_generation_ends_with_its_kind(folder):
    async with mock_cluster(folder) as cluster, Client(cluster) as client:
        cluster.decodes[0].failures.append(Failure("INTERNAL", after_tokens=1))
        await client.send(start("a"))
        await client.until_end_of("a")
        assert client.ends["a"][0].kind == common_pb2.ERROR_KIND_INTERNAL
        assert len(client.tokens["a"]) == 2
        await client.send(start("b", timeout_ms=1))
        cluster.decodes[0].reservations.close()
        await client.until_end_of("b")
        assert client.ends["b"][0].kind == common_pb2.ERROR_KIND_DEADLINE_EXCEEDED


async def test_health_follows_readiness(folder):
    async with mock_cluster(folder, decode=0) as cluster, channel_to(cluster) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="baton.inference.v1.InferenceService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        worker = await cluster.add_worker("decode")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        await worker.kill()


async def test_models_and_reflection_answer(folder):
    async with mock_cluster(folder) as cluster, channel_to(cluster) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [(m.id, m.max_model_len) for m in models] == [("tiny", 512)]
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = {s.name for s in (await call.read()).list_services_response.service}
        assert "baton.inference.v1.InferenceService" in services
        await call.done_writing()


def channel_to(cluster: MockCluster) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(cluster.router.grpc_address)


async def test_shutdown_ends_streams_with_their_frames(folder):
    async with mock_cluster(folder) as cluster, Client(cluster) as client:
        cluster.decodes[0].steps.close()
        await client.send(start("a", sampling={"max_tokens": 50}))
        while not client.tokens["a"]:
            await client.read()
        await cluster.stop_router()
        await client.rest()
        assert client.ends["a"][0].kind == common_pb2.ERROR_KIND_DRAINING
        assert await client.call.code() == grpc.StatusCode.OK


async def test_a_frame_that_cannot_be_read_ends_the_stream_with_an_error_status(folder):
    """Requests that ran on it get no end frame: OK would be a lie."""
    async with mock_cluster(folder, step_s=0.01) as cluster:
        async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
            call = channel.stream_stream("/baton.inference.v1.InferenceService/Generate")()
            await call.write(start("a", sampling={"max_tokens": 40}).SerializeToString())
            await call.read()
            await call.write(b"\xff\xff\xff")
            assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.INVALID_ARGUMENT
            assert "can't be read" in await call.details()
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the abort")
