"""Prefill and decode worker together: real gRPC, UCX and Redis, a tiny random model. Tokens, aborts, faults."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2
from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.engine.cost_rates import DEFAULT_RATES
from common.kvcache.kv_cache import num_blocks_for
from common.sampling_params import SamplingParams
from common.worker.loading import LoadedModel, load
from tests.worker_harness import (
    RouterSession,
    RunningWorker,
    generate,
    make_spec,
    metric,
    reference,
    start_worker,
    worker,
)

BLOCK_SIZE = 8


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
        prefill_budget_tokens=48,
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
class Pair:
    prefill: RunningWorker
    decode: RunningWorker
    prefill_session: RouterSession
    decode_session: RouterSession
    model: LoadedModel

    async def generate(self, spec: worker_pb2.SequenceSpec):
        return await generate(self.prefill_session, self.decode_session, spec)

    async def until_idle(self) -> None:
        await self.prefill_session.until_idle()
        await self.decode_session.until_idle()


@pytest.fixture
async def pair(settings: Settings, loaded: tuple[LoadedModel, LoadedModel]) -> AsyncIterator[Pair]:
    prefill = await start_worker("prefill", settings, loaded[0])
    decode = await start_worker("decode", settings, loaded[1])
    try:
        async with RouterSession(prefill.info) as p, RouterSession(decode.info) as d:
            yield Pair(prefill, decode, p, d, loaded[0])
    finally:
        await asyncio.gather(prefill.stop(), decode.stop())


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(300), k=length)


async def test_tokens_equal_the_undisturbed_model_alone_and_together(pair):
    lengths = [1, 7, 8, 9, 16, 47, 48, 49, 130]
    specs = [make_spec(f"t{n}", random_prompt(n), pair.prefill.info, max_tokens=12) for n in lengths]
    alone, *_ = await pair.generate(specs[0])
    results = await asyncio.gather(*(pair.generate(spec) for spec in specs[1:]))
    for spec, tokens in zip(specs, [alone, *(r[0] for r in results)], strict=True):
        expected = reference(pair.model, spec.token_ids, SamplingParams(max_tokens=12, temperature=0.0))
        assert tokens == expected, f"prompt of {len(spec.token_ids)}"
    await pair.until_idle()


async def test_sampled_tokens_depend_on_seed_and_position_alone(pair):
    prompt = random_prompt(20)
    spec = make_spec("t", prompt, pair.prefill.info, max_tokens=10, temperature=1.0, seed=5)
    tokens, *_ = await pair.generate(spec)
    sampling = SamplingParams(max_tokens=10, temperature=1.0, top_p=1.0, seed=5)
    assert tokens == reference(pair.model, prompt, sampling)
    # As after a migration: prompt and what was emitted, to other workers.
    resumed = make_spec(
        "t2", [*prompt, *tokens[:4]], pair.prefill.info, max_tokens=10, temperature=1.0, seed=5, num_prompt_tokens=20
    )
    assert (await pair.generate(resumed))[0] == tokens[4:]


async def test_the_first_token_comes_from_prefill_and_each_leg_ends_once_with_its_figures(pair):
    tokens, prefill, decode = await pair.generate(make_spec("t", random_prompt(30), pair.prefill.info))
    assert prefill.tokens == tokens[:1]
    assert decode.tokens == tokens[1:]
    for leg in (prefill, decode):
        assert [o.leg_ended for o in leg.outputs] == [False] * (len(leg.outputs) - 1) + [True]
        assert leg.last.timings.transfer_s > 0
        assert leg.last.timings.transfer_bytes == 4 * pair.model.fmt.layout.block_bytes * 2
    assert prefill.last.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    assert decode.last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert decode.last.timings.decode_s > 0
    assert prefill.last.timings.prefill_s > 0


async def test_what_is_cached_is_neither_computed_nor_sent_again(pair):
    prompt = random_prompt(50)
    first, *_ = await pair.generate(make_spec("a", prompt, pair.prefill.info))
    again, prefill, decode = await pair.generate(make_spec("b", prompt, pair.prefill.info))
    assert again == first
    assert prefill.last.num_cached_tokens == decode.last.num_cached_tokens == 48
    assert decode.last.timings.transfer_bytes == pair.model.fmt.layout.block_bytes * 2
    # A second turn finds the first one's answer, too, on the decode side.
    turn = [*prompt, *first, 5, 6, 7]
    expected = reference(pair.model, turn, SamplingParams(max_tokens=8, temperature=0.0))
    tokens, _, decode = await pair.generate(make_spec("c", turn, pair.prefill.info))
    assert tokens == expected
    assert decode.last.num_cached_tokens == 56
    assert decode.last.timings.transfer_bytes == pair.model.fmt.layout.block_bytes * 2  # one block, in both layers
    # And a prompt whose blocks are all there already needs no byte.
    whole, _, decode = await pair.generate(make_spec("d", prompt[:48], pair.prefill.info))
    assert whole == reference(pair.model, prompt[:48], SamplingParams(max_tokens=8, temperature=0.0))
    assert decode.last.timings.transfer_bytes == 0


async def test_the_decode_worker_alone_says_the_same(pair):
    prompt = random_prompt(60)
    spec = make_spec("t", prompt, pair.decode.info)
    await pair.decode_session.send(reserve=worker_pb2.ReserveCommand(spec=spec, prefill_here=True))
    leg = await pair.decode_session.ended("t")
    assert leg.tokens == reference(pair.model, prompt, SamplingParams(max_tokens=8, temperature=0.0))
    assert "t" not in pair.decode_session.targets


async def test_a_first_token_that_ends_the_request_decodes_nothing(pair):
    prompt = random_prompt(20)
    tokens, prefill, decode = await pair.generate(make_spec("t", prompt, pair.prefill.info, max_tokens=1))
    assert len(tokens) == 1
    assert prefill.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert decode.tokens == []
    assert decode.last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    stop = make_spec("u", prompt, pair.prefill.info, max_tokens=9, stop_token_ids=tokens)
    tokens, prefill, _ = await pair.generate(stop)
    assert prefill.outputs[0].finish_reason == common_pb2.FINISH_REASON_STOP
    assert prefill.outputs[0].num_cached_tokens == 16, "the router ends the request with this frame"
    await pair.until_idle()


async def test_more_requests_than_fit_all_end_with_their_own_text(pair):
    """Many times the pool's blocks and the batch's places: waiting, eviction, preemption."""
    specs = [make_spec(f"t{i}", random_prompt(90, seed=i), pair.prefill.info, max_tokens=100) for i in range(20)]
    results = await asyncio.gather(*(pair.generate(spec) for spec in specs))
    for spec, (tokens, *_) in list(zip(specs, results, strict=True))[::5]:
        assert tokens == reference(pair.model, spec.token_ids, SamplingParams(max_tokens=100, temperature=0.0))
    await pair.until_idle()
    assert await metric(pair.decode.info, "baton_preemptions_total") > 0


@pytest.mark.parametrize("stage", ["reserved", "prefilling", "decoding"])
async def test_an_abort_gives_all_blocks_back_on_both_sides(pair, stage):
    spec = make_spec("t", random_prompt(200), pair.prefill.info, max_tokens=200)
    p, d = pair.prefill_session, pair.decode_session
    await d.send(reserve=worker_pb2.ReserveCommand(spec=spec))
    await d.until(lambda: "t" in d.targets)
    if stage != "reserved":
        await p.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=d.targets["t"]))
    if stage == "decoding":
        await d.until(lambda: len(d.legs["t"].tokens) > 3)
    await d.abort("t")
    assert (await d.ended("t")).last.finish_reason == common_pb2.FINISH_REASON_ABORT
    if stage == "prefilling":
        await p.abort("t")
        await p.ended("t")
    await pair.until_idle()


async def test_a_storm_of_aborts_leaves_no_block_behind(pair):
    chance = random.Random(7)
    p, d = pair.prefill_session, pair.decode_session

    async def one(i: int) -> None:
        name, abort_after = f"t{i}", chance.choice([None, None, 0, 1, 5])
        spec = make_spec(name, random_prompt(chance.randrange(1, 200), seed=i), pair.prefill.info, max_tokens=30)
        await d.send(reserve=worker_pb2.ReserveCommand(spec=spec))
        await d.until(lambda: name in d.targets)
        await p.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=d.targets[name]))
        if abort_after is not None:
            await d.until(lambda: len(d.legs[name].tokens) >= abort_after)
            await asyncio.gather(p.abort(name), d.abort(name))
        prefill, decode = await asyncio.gather(p.ended(name), d.ended(name))
        if abort_after is None:
            assert len(prefill.tokens) + len(decode.tokens) == 30

    await asyncio.gather(*(one(i) for i in range(90)))
    await pair.until_idle()


async def test_a_session_that_ends_takes_its_requests_with_it(pair):
    async with RouterSession(pair.decode.info) as other, RouterSession(pair.prefill.info) as other_p:
        for i in range(3):
            spec = make_spec(f"t{i}", random_prompt(40, seed=i), pair.prefill.info, max_tokens=400)
            await other.send(reserve=worker_pb2.ReserveCommand(spec=spec))
            await other.until(lambda i=i: f"t{i}" in other.targets)
            await other_p.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=other.targets[f"t{i}"]))
        await other.until(lambda: other.legs["t0"].tokens)
        assert pair.decode_session.load is not None
    await pair.until_idle()


async def test_two_routers_hear_only_of_their_own_and_both_of_the_load(pair):
    async with RouterSession(pair.decode.info) as other:
        spec = make_spec("t", random_prompt(10), pair.decode.info, max_tokens=30)
        await other.send(reserve=worker_pb2.ReserveCommand(spec=spec, prefill_here=True))
        await pair.decode_session.until(lambda: any(load.num_running for load in pair.decode_session.loads))
        await other.ended("t")
        await pair.decode_session.until_idle()
        assert not pair.decode_session.legs
        assert not pair.decode_session.over


async def test_a_wrong_secret_fails_the_prefill_leg_and_touches_nothing(pair):
    spec = make_spec("t", random_prompt(40), pair.prefill.info)
    d = pair.decode_session
    await d.send(reserve=worker_pb2.ReserveCommand(spec=spec))
    await d.until(lambda: "t" in d.targets)
    forged = worker_pb2.TransferTarget()
    forged.CopyFrom(d.targets["t"])
    forged.secret = bytes(16)
    await pair.prefill_session.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=forged))
    leg = await pair.prefill_session.ended("t")
    assert leg.last.HasField("error")
    assert not d.legs["t"].outputs
    await d.abort("t")
    await pair.until_idle()


async def test_a_deadline_ends_the_leg_that_waits_for_its_kv(pair):
    spec = make_spec("t", random_prompt(40), pair.decode.info, timeout_ms=100)
    await pair.decode_session.send(reserve=worker_pb2.ReserveCommand(spec=spec))
    leg = await pair.decode_session.ended("t")
    assert leg.last.error.kind == common_pb2.ERROR_KIND_DEADLINE_EXCEEDED
    await pair.until_idle()


async def test_commands_for_the_other_phase_and_used_ids_are_answered_with_an_error(pair):
    spec = make_spec("t", random_prompt(10), pair.prefill.info)
    await pair.prefill_session.send(reserve=worker_pb2.ReserveCommand(spec=spec))
    leg = await pair.prefill_session.ended("t")
    assert leg.last.error.kind == common_pb2.ERROR_KIND_INVALID_REQUEST
    d = pair.decode_session
    for _ in range(2):
        await d.send(reserve=worker_pb2.ReserveCommand(spec=spec))
    leg = await d.ended("t")
    assert "in use" in leg.last.error.message
    await d.abort("t")
    await pair.until_idle()


async def test_a_stale_epoch_and_a_session_without_hello_are_refused(pair):
    async with RouterSession(pair.decode.info, epoch="0" * 16) as stale:
        with pytest.raises(grpc.aio.AioRpcError, match="it was restarted"):
            await stale.until(lambda: stale.welcome)
        assert stale.error is not None
        assert stale.error.code() == grpc.StatusCode.ABORTED
    async with grpc.aio.insecure_channel(pair.decode.info.grpc_address) as channel:
        call = channel.stream_stream(
            "/baton.worker.v1.WorkerService/Session",
            request_serializer=worker_pb2.SessionRequest.SerializeToString,
            response_deserializer=worker_pb2.SessionResponse.FromString,
        )()
        await call.write(worker_pb2.SessionRequest(abort=worker_pb2.AbortCommand(transfer_id="t")))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_stopping_workers_end_what_runs_with_an_error_and_leave_nothing_behind(settings, loaded):
    before = asyncio.all_tasks()
    threads = {t.name for t in threading.enumerate()}
    prefill = await start_worker("prefill", settings, loaded[0])
    decode = await start_worker("decode", settings, loaded[1])
    async with RouterSession(decode.info) as d, RouterSession(prefill.info) as p:
        spec = make_spec("t", random_prompt(40), decode.info, max_tokens=400)
        await d.send(reserve=worker_pb2.ReserveCommand(spec=spec))
        await d.until(lambda: "t" in d.targets)
        await p.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=d.targets["t"]))
        waiting = make_spec("u", random_prompt(40, seed=1), decode.info)
        await d.send(reserve=worker_pb2.ReserveCommand(spec=waiting))
        await d.until(lambda: d.legs["t"].tokens and "u" in d.targets)
        await asyncio.gather(prefill.stop(), decode.stop())
        await d.until(lambda: d.over)
        assert d.legs["u"].last.error.kind == common_pb2.ERROR_KIND_DRAINING
        assert d.legs["t"].ended
        assert d.error is None
    assert asyncio.all_tasks() == before
    assert not {t.name for t in threading.enumerate()} - threads - {"asyncio_0", "asyncio_1", "asyncio_2"}


async def test_a_host_tier_keeps_what_the_pools_give_up_and_no_text_changes(settings, loaded):
    """Swapped sequences, and prompts that the pool has long evicted: found again, with the same tokens."""
    settings = settings.model_copy(update={"host_kv_bytes": 8 << 20})
    num_slots = num_blocks_for(loaded[0].fmt.layout, settings.host_kv_bytes)
    # By a larger model's rates: so small a one computes its KV as quickly as it copies it.
    both = [replace(each, host_slots=num_slots, rates=DEFAULT_RATES) for each in loaded]
    async with (
        worker("prefill", settings, both[0]) as prefill,
        worker("decode", settings, both[1]) as decode,
        RouterSession(prefill.info) as p,
        RouterSession(decode.info) as d,
    ):
        prompts = [random_prompt(90, seed=50 + i) for i in range(16)]
        specs = [make_spec(f"t{i}", prompt, prefill.info, max_tokens=100) for i, prompt in enumerate(prompts)]
        results = await asyncio.gather(*(generate(p, d, spec) for spec in specs))
        assert await metric(decode.info, "baton_preemptions_swapped_total") > 0
        for i, prompt in enumerate(prompts[::3]):
            tokens, first, second = await generate(p, d, make_spec(f"u{i}", prompt, prefill.info, max_tokens=100))
            assert tokens == results[3 * i][0]
            assert tokens == reference(both[0], prompt, SamplingParams(max_tokens=100, temperature=0.0))
            assert first.last.num_cached_tokens == second.last.num_cached_tokens == 88
        assert await metric(decode.info, "baton_prefix_cache_host_hits_total") > 0
        await p.until_idle()
        await d.until_idle()
