"""The gRPC target against a servicer that follows Baton's protocol, and one that breaks it."""

import asyncio
import contextlib
import time

import grpc
import pytest

from baton.common.v1 import common_pb2
from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from loadtest.client.grpc_stream import GrpcTarget
from loadtest.client.target import GenerationOptions
from loadtest.prompts import PromptMaker, words_of
from loadtest.record import TargetError
from loadtest.runner import LoadRun, RunLimits
from loadtest.streams import parse_stream
from loadtest.tokens import TokenSource
from tests.fakes.mock_openai_server import until


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Interleaves all requests of a stream, two tokens a chunk. fault: what it does to each request."""

    def __init__(self, fault=""):
        self.fault = fault
        self.starts = []
        self.metadata = []
        self.aborted = []

    async def ListModels(self, request, context):
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="m", max_model_len=99)])

    async def Generate(self, frames, context):
        self.metadata.append(dict(context.invocation_metadata()))
        out = asyncio.Queue()

        async def take():
            async for frame in frames:
                if frame.WhichOneof("frame") == "abort":
                    self.aborted.append(frame.abort.request_id)
                    continue
                self.starts.append(frame.start)
                await self.answer(frame.start, out)

        taking = asyncio.create_task(take())
        try:
            while (frame := await out.get()) is not None:
                yield frame
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        finally:
            taking.cancel()

    async def answer(self, start, out):
        def frame(**kwargs):
            return inference_pb2.GenerateResponse(request_id=start.request_id, **kwargs)

        if self.fault == "overloaded":
            error = common_pb2.ErrorDetail(kind=common_pb2.ERROR_KIND_OVERLOADED, message="too much")
            await out.put(frame(error=error))
            return
        for first in range(0, start.sampling.max_tokens, 2):
            ids = list(range(first, min(first + 2, start.sampling.max_tokens)))
            await out.put(frame(chunk=inference_pb2.TokenChunk(first_index=first, token_ids=ids, text="ab")))
            if self.fault == "error":
                error = common_pb2.ErrorDetail(kind=common_pb2.ERROR_KIND_INTERNAL, message="lost")
                await out.put(frame(error=error))
                return
            if self.fault == "silence":
                return
            if self.fault == "close":
                await out.put(None)
                return
        usage = inference_pb2.Usage(
            prompt_tokens=len(start.tokens.token_ids), completion_tokens=ids[-1] + 1, cached_tokens=1
        )
        finished = inference_pb2.GenerationFinished(finish_reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
        await out.put(frame(finished=finished))


@contextlib.asynccontextmanager
async def serving(fault=""):
    server = grpc.aio.server()
    fake = FakeInference(fault)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = GrpcTarget(f"grpc://127.0.0.1:{port}", GenerationOptions(timeout_s=7.0))
    try:
        yield fake, target
    finally:
        await target.close()
        await server.stop(0)


async def run_load(target, *streams, **limits):
    maker = PromptMaker("ids", words_of, TokenSource(0))
    run = LoadRun(target, [parse_stream(s) for s in streams], maker, RunLimits(**limits))
    return await run.run()


async def test_many_requests_run_on_one_stream_for_each_tenant():
    async with serving() as (fake, target):
        info = await target.open()
        assert (info.model, info.max_model_len, info.api) == ("m", 99, "grpc")
        result = await run_load(
            target,
            "name=a key=ka salt=s rate=200 workload=fixed:input=6,output=5",
            "name=b key=kb rate=200 workload=fixed:input=3,output=1",
            requests=30,
        )
    assert all(r.ok for r in result.records), {r.failure_detail for r in result.records}
    for record in result.records:
        tokens = 5 if record.stream == 0 else 1
        assert record.output_tokens == record.event_tokens == tokens
        assert len(record.events_s) == (tokens + 1) // 2
        assert (record.usage_cached_tokens, record.finish_reason) == (1, "length")
        assert record.events_s[-1] <= record.end_s <= time.perf_counter()
    assert sorted(m["authorization"] for m in fake.metadata) == ["Bearer ka", "Bearer kb"]
    start = next(s for s in fake.starts if s.cache_salt)
    assert (start.sampling.ignore_eos, start.sampling.temperature, start.timeout_ms) == (True, 0.0, 7000)
    assert len({s.request_id for s in fake.starts}) == 30


@pytest.mark.parametrize(
    ("fault", "name"),
    [("overloaded", "grpc_overloaded"), ("error", "stream_error"), ("close", "grpc_unavailable")],
)
async def test_every_way_to_fail_has_its_name(fault, name):
    async with serving(fault) as (_, target):
        await target.open()
        result = await run_load(target, "name=a concurrency=1 workload=fixed:output=4", requests=3)
    # Each request got a stream that works: a broken one is replaced.
    assert [r.failure_name for r in result.records] == [name] * 3
    assert all(r.failure_detail for r in result.records)


async def test_a_request_that_times_out_is_aborted_at_the_server():
    async with serving("silence") as (fake, target):
        await target.open()
        result = await run_load(target, "name=a rate=100 workload=fixed:output=4", requests=3, timeout_s=0.1)
        assert {r.failure_name for r in result.records} == {"timeout"}
        await until(lambda: len(fake.aborted) == 3)
    assert sorted(fake.aborted) == sorted(s.request_id for s in fake.starts)


async def test_conversations_send_the_servers_tokens_back():
    async with serving() as (fake, target):
        await target.open()
        await run_load(
            target, "name=a concurrency=1 workload=chat:turns=2,system=4,input=3,output=3,think_s=0", requests=2
        )
    first, second = (list(s.tokens.token_ids) for s in fake.starts)
    assert second == [*first, 0, 1, 2, *second[-3:]]


async def test_an_absent_router_is_one_line():
    target = GrpcTarget("grpc://127.0.0.1:1", GenerationOptions())
    with pytest.raises(TargetError, match="is the router started"):
        await target.open()
    await target.close()
    for url in ("grpc://", "http://h"):
        with pytest.raises(TargetError):
            GrpcTarget(url, GenerationOptions())
