"""What a worker shows to the outside: health, reflection, metrics, bounds, and its end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio import Redis

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.errors import StartupError
from common.registry import blocks_key, decode_record, worker_key
from common.worker import liveness
from common.worker import session as session_module
from common.worker.loading import LoadedModel, load
from deploy.drain import drain as tell_to_drain
from tests.worker_harness import RouterSession, RunningWorker, make_spec, scrape, start_worker, worker


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture(scope="module")
def settings(tiny_model_folder: Path, redis_url: str) -> Settings:
    return Settings(
        model=str(tiny_model_folder),
        served_model_name="tiny-model",
        redis_url=redis_url,
        kv_cache_bytes=1 << 20,
        num_threads=1,
        landing_slots=2,
        landing_slot_bytes=64 << 10,
        shutdown_grace_s=0.1,
    )


@pytest.fixture(scope="module")
def loaded(settings: Settings) -> LoadedModel:
    return load(settings)


@pytest.fixture
async def decode(settings: Settings, loaded: LoadedModel) -> AsyncIterator[RunningWorker]:
    async with worker("decode", settings, loaded) as running:
        yield running


async def run_alone(session: RouterSession, transfer_id: str, tokens: list[int], max_tokens: int = 8) -> None:
    spec = make_spec(transfer_id, tokens, session.info, max_tokens=max_tokens)
    await session.send(reserve=worker_pb2.ReserveCommand(spec=spec, prefill_here=True))


async def test_health_reflection_and_info_answer(decode):
    async with grpc.aio.insecure_channel(decode.info.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "baton.worker.v1.WorkerService", "baton.transfer.v1.TransferService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {s.name for s in (await call.read()).list_services_response.service}
        assert {"baton.worker.v1.WorkerService", "baton.transfer.v1.TransferService"} <= listed
        await call.done_writing()
        info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
    assert (info.worker_id, info.epoch, info.role) == (decode.info.worker_id, decode.info.epoch, worker_pb2.ROLE_DECODE)
    assert (info.model_name, info.block_size, info.num_blocks) == ("tiny-model", 16, 128)


async def test_the_registry_holds_the_record_and_the_blocks_while_the_worker_lives(settings, loaded):
    redis = Redis.from_url(settings.redis_url.get_secret_value())
    async with worker("decode", settings, loaded) as running:
        info = running.info
        assert decode_record(await redis.get(worker_key("default", info.worker_id))) == info.record(draining=False)
        async with RouterSession(info) as session:
            await run_alone(session, "t", list(range(40)))
            await session.ended("t")
            assert session.load is not None
            num_cached = session.load.num_cached_blocks
        assert num_cached == 2
        async with asyncio.timeout(20):
            while await redis.scard(blocks_key("default", info.worker_id, info.epoch)) != num_cached:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # Redis can't call back
    assert await redis.keys("*worker:*") == await redis.keys("*blocks*") == []
    await redis.aclose()


async def test_metrics_count_what_happened(decode):
    async with RouterSession(decode.info) as session:
        for name in ("a", "b"):
            await run_alone(session, name, list(range(40)))
            await session.ended(name)
        await session.until_idle()
    values = await scrape(decode.info)
    assert values["baton_requests_running"] == values["baton_requests_waiting"] == 0
    assert values["baton_kv_cache_usage_ratio"] == 0
    assert values["baton_kv_blocks{state=free}"] == 126
    assert values["baton_kv_blocks{state=cached}"] == 2
    assert values["baton_prefix_cache_queries_total"] == 80
    assert values["baton_prefix_cache_hits_total"] == 32
    assert values["baton_request_queue_seconds_count"] == 2
    assert values["baton_request_prefill_seconds_count"] == 2
    assert values["baton_request_decode_seconds_count"] == 2
    assert values["baton_transfer_seconds_count"] == values["baton_transfer_bytes_total"] == 0
    assert sum(n for name, n in values.items() if name.startswith("baton_step_seconds_count")) >= 14
    assert values["baton_preemptions_total"] == 0
    assert values["baton_cache_config_info{block_size=16}{num_blocks=128}"] == 1
    assert any(name.startswith("baton_model_info") and "tiny-model" in name for name in values)


class CountingRunner:
    def __init__(self, runner) -> None:
        self.runner = runner
        self.num_steps = 0

    def execute(self, scheduled):
        self.num_steps += 1
        return self.runner.execute(scheduled)


async def test_each_step_is_at_most_one_frame_a_session(settings, loaded):
    counting = CountingRunner(loaded.runner)
    async with (
        worker("decode", settings, replace(loaded, runner=counting)) as running,
        RouterSession(running.info) as session,
    ):
        for i in range(4):
            await run_alone(session, f"t{i}", [i] * 20, max_tokens=30)
        for i in range(4):
            assert len((await session.ended(f"t{i}")).tokens) == 30
        assert session.num_output_frames <= counting.num_steps


async def test_a_router_that_does_not_read_loses_its_session_and_its_requests(decode, monkeypatch):
    monkeypatch.setattr(session_module, "MAX_QUEUED_FRAMES", 16)
    name = "x" * 30_000  # in every frame, so that gRPC's own windows are full after some 4 MB
    async with RouterSession(decode.info, read=False) as deaf, RouterSession(decode.info) as other:
        await run_alone(deaf, name, [1, 2, 3], max_tokens=480)
        await other.until(lambda: any(load.num_running for load in other.loads))
        await other.until_idle()
        frames, error = await drain(deaf)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "unread" in (error.details() or "")
        assert len(frames) < 480
        await run_alone(other, "t", [1, 2, 3])
        assert (await other.ended("t")).tokens


async def drain(session: RouterSession) -> tuple[list[worker_pb2.SessionResponse], grpc.aio.AioRpcError]:
    frames = []
    try:
        while isinstance(frame := await session.call.read(), worker_pb2.SessionResponse):
            frames.append(frame)
    except grpc.aio.AioRpcError as error:
        return frames, error
    raise AssertionError("the session ended well")


async def test_an_idle_session_still_hears_of_the_load(decode):
    async with RouterSession(decode.info) as session:
        await session.until(lambda: session.num_step_frames >= 3)
        assert not session.legs


class BrokenRunner:
    def execute(self, scheduled):
        raise RuntimeError("the device is gone")


async def test_an_engine_that_fails_twice_ends_the_worker_with_a_line_and_a_code(settings, loaded):
    running = await start_worker("decode", settings, replace(loaded, runner=BrokenRunner()))
    async with RouterSession(running.info) as session:
        for name in ("a", "b"):
            await run_alone(session, name, [1, 2, 3])
            assert (await session.ended(name)).last.HasField("error")
        await session.until(lambda: session.over)
        with pytest.raises(StartupError, match="2 engine steps in a row failed") as caught:
            await running.task
    assert caught.value.exit_code == 1
    redis = Redis.from_url(settings.redis_url.get_secret_value())
    assert await redis.exists(worker_key("default", running.info.worker_id)) == 0
    await redis.aclose()


class HeldRunner:
    """Computes when `go_on` is set."""

    def __init__(self, runner) -> None:
        self.runner = runner
        self.go_on = threading.Event()

    def execute(self, scheduled):
        assert self.go_on.wait(20)
        return self.runner.execute(scheduled)


async def health(info) -> int:
    async with grpc.aio.insecure_channel(info.grpc_address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
        return int(answer.status)


async def test_a_stuck_engine_is_unready_and_said_to_be_stuck_until_it_moves_again(settings, loaded, monkeypatch):
    monkeypatch.setattr(liveness, "COLD_STALL_S", 0.5)
    held = HeldRunner(loaded.runner)
    short = settings.model_copy(update={"engine_stall_s": 0.5})
    stuck = worker("decode", short, replace(loaded, runner=held))
    async with stuck as running, RouterSession(running.info) as session:
        await session.until(lambda: session.load is not None and session.load.engine_beats > 1)
        assert await health(running.info) == health_pb2.HealthCheckResponse.SERVING
        await run_alone(session, "t", [1, 2, 3])
        await session.until(lambda: session.load is not None and session.load.engine_stalled)
        assert await health(running.info) == health_pb2.HealthCheckResponse.NOT_SERVING
        held.go_on.set()
        assert (await session.ended("t")).tokens
        await session.until(lambda: session.load is not None and not session.load.engine_stalled)
        assert await health(running.info) == health_pb2.HealthCheckResponse.SERVING


async def test_an_engine_that_stays_stuck_ends_its_worker_for_the_supervisor_to_start_it_again(
    settings, loaded, monkeypatch
):
    monkeypatch.setattr(liveness, "COLD_STALL_S", 0.3)
    held = HeldRunner(loaded.runner)
    short = settings.model_copy(update={"engine_stall_s": 0.3, "engine_exit_s": 0.6, "canary_interval_s": 0.1})
    running = await start_worker("decode", short, replace(loaded, runner=held))
    with pytest.raises(StartupError, match="has not moved") as caught:  # the canary alone finds it out
        await running.task
    assert caught.value.exit_code == 1
    held.go_on.set()


async def test_a_port_in_use_is_one_line_that_says_what_to_do(settings, loaded):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key in ("grpc_port", "metrics_port"):
            with pytest.raises(StartupError, match=key):
                await start_worker("prefill", settings.model_copy(update={key: port}), loaded)


def test_a_context_that_cannot_be_had_is_refused_before_anything_starts(settings):
    with pytest.raises(StartupError, match=r"max_model_len 513 is more than the model's 512"):
        load(settings.model_copy(update={"max_model_len": 513}))
    tight = settings.model_copy(update={"max_model_len": 512, "block_size": 256, "kv_cache_bytes": 1 << 16})
    with pytest.raises(StartupError, match="set kv_cache_bytes higher"):
        load(tight)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["ucx", "sockets"])
async def test_a_worker_without_the_lane_that_is_required_does_not_start_and_names_both(
    settings, loaded, role, transport
):
    demanding = settings.model_copy(update={"require_transport": "rdma", "transfer_transport": transport})
    with pytest.raises(StartupError, match=r"require_transport is rdma, what is there is \S+/\S+"):
        await start_worker(role, demanding, loaded)


async def test_a_worker_that_others_could_reach_starts_only_where_that_network_is_trusted_by_name(settings, loaded):
    exposed = settings.model_copy(update={"host": "0.0.0.0"})
    with pytest.raises(StartupError, match="plaintext-trusted-network"):
        await start_worker("decode", exposed, loaded)


class SlowRunner:
    def __init__(self, runner) -> None:
        self.runner = runner

    def execute(self, scheduled):
        time.sleep(0.01)
        return self.runner.execute(scheduled)


async def test_a_worker_that_is_told_to_drain_hands_back_what_runs_and_ends_well(settings, loaded):
    running = await start_worker("decode", settings, replace(loaded, runner=SlowRunner(loaded.runner)))
    address, epoch = running.info.grpc_address, running.info.epoch
    async with RouterSession(running.info) as session:
        await run_alone(session, "t", [1, 2, 3], max_tokens=480)
        await session.until(lambda: session.legs["t"].tokens)
        with pytest.raises(StartupError, match="it was restarted"):
            await tell_to_drain(address, "0" * 16)
        await tell_to_drain(address, epoch, 0.0)
        leg = await session.ended("t")
        assert leg.last.error.kind == common_pb2.ERROR_KIND_DRAINING
        assert session.load is not None
        assert session.load.draining
    await running.task
