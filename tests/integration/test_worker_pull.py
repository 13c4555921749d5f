"""Prefill workers that fetch prefixes from each other and from decode workers: real gRPC, UCX and Redis."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from baton.transfer.v1 import transfer_pb2, transfer_pb2_grpc
from baton.worker.v1 import worker_pb2
from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.sampling_params import SamplingParams
from common.transfer_cost import CostEstimator
from common.worker.info import WorkerInfo
from common.worker.loading import LoadedModel, load
from tests.worker_harness import RouterSession, RunningWorker, make_spec, metric, reference, worker

BLOCK_SIZE = 8


class Eager(CostEstimator):
    """Pulls whatever there is, with time enough: a tiny model computes faster than any network."""

    def is_worth_pulling(self, num_tokens: int, token_bytes: int) -> bool:
        return num_tokens > 0

    def patience_s(self, num_tokens: int) -> float:
        return 10.0


class Hasty(Eager):
    def patience_s(self, num_tokens: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


@pytest.fixture(scope="module")
def settings(tiny_model_folder: Path, redis_url: str) -> Settings:
    return Settings(
        model=str(tiny_model_folder),
        redis_url=redis_url,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=1 << 20,
        prefill_budget_tokens=64,
        max_running=16,
        num_threads=1,
        landing_slots=4,
        landing_slot_bytes=64 << 10,
        shutdown_grace_s=0.2,
    )


@pytest.fixture(scope="module")
def loaded(settings: Settings) -> list[LoadedModel]:
    return [load(settings) for _ in range(3)]


@dataclass
class Trio:
    first: RunningWorker
    second: RunningWorker
    decode: RunningWorker
    sessions: dict[str, RouterSession]
    model: LoadedModel

    async def prefill(
        self,
        on: RunningWorker,
        name: str,
        prompt: list[int],
        sources: list[worker_pb2.PullSource] | None = None,
        *,
        lend: bool = False,
    ) -> worker_pb2.SequenceOutput:
        """One request; the prefill leg's end. lend: the decode worker may be asked for what it holds."""
        d, p = self.sessions[self.decode.info.worker_id], self.sessions[on.info.worker_id]
        spec = make_spec(name, prompt, on.info)
        await d.send(reserve=worker_pb2.ReserveCommand(spec=spec))
        await d.until(lambda: name in d.targets)
        target = worker_pb2.TransferTarget()
        target.CopyFrom(d.targets[name])
        if not lend:
            target.pull_secret = b""
        await p.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=target, pull_sources=sources or []))
        prefill, decode = await p.ended(name), await d.ended(name)
        assert not prefill.last.HasField("error"), prefill.last.error.message
        expected = reference(self.model, prompt, SamplingParams(max_tokens=8, temperature=0.0))
        assert [*prefill.tokens, *decode.tokens] == expected
        return prefill.last

    async def until_idle(self) -> None:
        for session in self.sessions.values():
            await session.until_idle()


@pytest.fixture
async def trio(
    settings: Settings, loaded: list[LoadedModel], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Trio]:
    monkeypatch.setattr("prefill_service.app.CostEstimator", getattr(request, "param", Eager))
    async with (
        worker("prefill", settings, loaded[0]) as first,
        worker("prefill", settings, loaded[1]) as second,
        worker("decode", settings, loaded[2]) as decode,
        RouterSession(first.info) as p1,
        RouterSession(second.info) as p2,
        RouterSession(decode.info) as d,
    ):
        sessions = {session.info.worker_id: session for session in (p1, p2, d)}
        yield Trio(first, second, decode, sessions, loaded[0])


def source(info: WorkerInfo, num_tokens: int, **changes: object) -> worker_pb2.PullSource:
    info = replace(info, **changes)  # type: ignore[arg-type]
    return worker_pb2.PullSource(
        address=info.grpc_address,
        worker_id=info.worker_id,
        epoch=info.epoch,
        secret=info.pull_secret,
        num_tokens=num_tokens,
    )


def random_prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 300) for _ in range(length)]


async def test_a_prefix_is_pulled_from_another_prefill_worker_and_the_text_is_the_same(trio: Trio) -> None:
    prompt = random_prompt(100, 1)
    await trio.prefill(trio.first, "a", prompt)
    longer = [*prompt[:90], *random_prompt(30, 2)]
    last = await trio.prefill(trio.second, "b", longer, [source(trio.first.info, 96)])
    # It had eleven blocks of these; the twelfth differs, and is computed.
    assert last.num_cached_tokens == 88
    assert await metric(trio.second.info, "baton_pulled_tokens_total") == 88
    assert await metric(trio.first.info, "baton_pull_requests_total{answer=granted}") == 1
    # What was pulled is cached here now, and is not pulled again.
    last = await trio.prefill(trio.second, "c", longer, [source(trio.first.info, 96)])
    assert last.num_cached_tokens == 112
    assert await metric(trio.second.info, "baton_pulls_total") == 1
    await trio.until_idle()


async def test_a_second_turn_is_pulled_from_the_decode_worker_that_grew_it(trio: Trio) -> None:
    prompt = random_prompt(60, 3)
    await trio.prefill(trio.first, "a", prompt)
    answer = reference(trio.model, prompt, SamplingParams(max_tokens=8, temperature=0.0))
    last = await trio.prefill(trio.second, "b", [*prompt, *answer, 5, 6, 7], lend=True)
    assert last.num_cached_tokens == 64, "prompt and answer, as far as blocks are full"
    assert await metric(trio.decode.info, "baton_pull_requests_total{answer=granted}") == 1
    await trio.until_idle()


FAILURES = {
    "nobody listens": {"grpc_address": "127.0.0.1:1"},
    "another incarnation": {"epoch": "0" * 16},
    "a wrong secret": {"pull_secret": bytes(16)},
}


@pytest.mark.parametrize("what", FAILURES)
async def test_a_pull_that_fails_falls_back_to_computing(trio: Trio, what: str) -> None:
    prompt = random_prompt(80, 4)
    await trio.prefill(trio.first, "a", prompt)
    last = await trio.prefill(trio.second, "b", prompt, [source(trio.first.info, 80, **FAILURES[what])])
    assert last.num_cached_tokens == 0
    assert await metric(trio.second.info, "baton_pulled_tokens_total") == 0
    assert await metric(trio.second.info, "baton_pulls_total") == 1
    await trio.until_idle()


async def test_a_prefix_that_is_not_there_any_more_is_computed(trio: Trio) -> None:
    last = await trio.prefill(trio.second, "b", random_prompt(80, 5), [source(trio.first.info, 80)])
    assert last.num_cached_tokens == 0
    assert await metric(trio.first.info, "baton_pull_requests_total{answer=refused}") == 1
    await trio.until_idle()


@pytest.mark.parametrize("trio", [Hasty], indirect=True)
async def test_pulls_in_great_haste_cost_no_block_and_no_text(trio: Trio) -> None:
    """Each may be too late or just in time."""
    prompt = random_prompt(100, 6)
    await trio.prefill(trio.first, "a", prompt)
    for number in range(6):
        longer = [*prompt, *random_prompt(8 + number, number)]
        await trio.prefill(trio.second, f"b{number}", longer, [source(trio.first.info, 96)])
    await trio.until_idle()


async def test_who_does_not_know_the_secret_is_sent_nothing(trio: Trio) -> None:
    prompt = random_prompt(40, 7)
    await trio.prefill(trio.first, "a", prompt)
    async with grpc.aio.insecure_channel(trio.first.info.grpc_address) as channel:
        stub = transfer_pb2_grpc.TransferServiceStub(channel)
        for changes in ({"secret": bytes(16)}, {"secret": b""}, {"epoch": "old"}, {"block_size": 16}, {"hashes": b"x"}):
            fields = {
                "transfer_id": "stranger",
                "epoch": trio.first.info.epoch,
                "secret": trio.first.info.pull_secret,
                "hashes": bytes(16),
                "block_size": BLOCK_SIZE,
                "timeout_ms": 1000,
                **changes,
            }
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Pull(transfer_pb2.PullRequest(**fields))
            assert caught.value.code() in (grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL)
    assert await metric(trio.first.info, "baton_pull_requests_total{answer=refused}") == 5
    await trio.until_idle()
