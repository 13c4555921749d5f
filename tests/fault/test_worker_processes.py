"""Workers as processes of their own, killed or stopped while KV is on its way: the survivor hears of it within a lease,
ends what can't go on with an error that a router answers by another attempt, and has all its blocks back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2
from common.embedded_redis import EmbeddedRedis
from common.registry import Role, decode_record, worker_key
from common.worker.info import WorkerInfo
from tests.tiny_model import make_tiny_model
from tests.worker_harness import BOUND_S, Leg, RouterSession, generate, make_spec, scrape

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 1.0
# What a router answers by another attempt, on other workers or with other blocks.
RETRIED = {
    common_pb2.ERROR_KIND_LEASE_LOST,
    common_pb2.ERROR_KIND_CORRUPT_KV,
    common_pb2.ERROR_KIND_STALE_EPOCH,
    common_pb2.ERROR_KIND_DRAINING,
}


@dataclass
class Process:
    child: asyncio.subprocess.Process
    info: WorkerInfo

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.child.pid, number)


@asynccontextmanager
async def worker_process(role: Role, name: str, model: Path, server: EmbeddedRedis) -> AsyncIterator[Process]:
    settings = {
        "model": model,
        "redis_url": server.url,
        "worker_id": name,
        "block_size": 8,
        "kv_cache_bytes": 32 << 20,
        "prefill_budget_tokens": 16,
        "num_threads": 1,
        "landing_slots": 2,
        "landing_slot_bytes": 64 << 10,
        "transfer_lease_s": LEASE_S,
        "log_format": "json",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli", role, *words, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        with redis.Redis.from_url(server.url) as client:
            async with asyncio.timeout(BOUND_S * 2):
                while (value := client.get(worker_key("default", name))) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        record = decode_record(value)
        fields = {f: getattr(record, f) for f in WorkerInfo.__slots__}
        yield Process(child, WorkerInfo(**fields))
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        await child.wait()


@dataclass
class Pair:
    prefill: Process
    decode: Process
    p: RouterSession
    d: RouterSession

    async def start_many(self, number: int) -> list[str]:
        """Requests whose KV is long on its way, all handed to both workers; returns when some of it has landed."""
        chance = random.Random(3)
        specs = {}
        for name in (f"t{i}" for i in range(number)):
            prompt = [chance.randrange(3, 300) for _ in range(1000)]
            specs[name] = make_spec(name, prompt, self.prefill.info, max_tokens=50)
            await self.d.send(reserve=worker_pb2.ReserveCommand(spec=specs[name]))
        for name, spec in specs.items():
            await self.d.until(lambda name=name: name in self.d.targets)
            await self.p.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=self.d.targets[name]))
        async with asyncio.timeout(BOUND_S):
            while (await scrape(self.decode.info))["baton_transfer_pieces_total"] == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not any(self.p.legs[name].ended for name in specs), "too quick to be disturbed"
        return list(specs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a prompt's KV takes its time."""
    folder = tmp_path_factory.mktemp("model") / "long"
    return make_tiny_model(folder, num_hidden_layers=8, max_position_embeddings=2048)


@pytest.fixture
async def pair(model: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        prefill, decode = await asyncio.gather(
            stack.enter_async_context(worker_process("prefill", "p0", model, server)),
            stack.enter_async_context(worker_process("decode", "d0", model, server)),
        )
        p = await stack.enter_async_context(RouterSession(prefill.info))
        d = await stack.enter_async_context(RouterSession(decode.info))
        yield Pair(prefill, decode, p, d)


def ended_well_or_to_be_tried_again(leg: Leg) -> bool:
    return not leg.last.HasField("error") or leg.last.error.kind in RETRIED


async def give_up_what_waits(session: RouterSession, names: list[str]) -> None:
    """As a router does that has lost the other worker."""
    for name in names:
        if not session.legs[name].ended:
            await session.abort(name)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prefill_worker_that_dies_or_stops_costs_the_decode_worker_nothing(
    pair: Pair, how: signal.Signals
) -> None:
    names = await pair.start_many(6)
    pair.prefill.signal(how)
    # At least one transfer was open: its loss is heard of here, whatever routers do.
    await pair.d.until(lambda: any(pair.d.legs[name].ended for name in names))
    assert any(pair.d.legs[name].last.HasField("error") for name in names if pair.d.legs[name].ended)
    await give_up_what_waits(pair.d, names)
    for name in names:
        leg = await pair.d.ended(name)
        assert ended_well_or_to_be_tried_again(leg), leg.last.error.message
    await pair.d.until_idle()
    if how is signal.SIGSTOP:
        pair.prefill.signal(signal.SIGCONT)
        await give_up_what_waits(pair.p, names)
        await pair.p.until_idle()
        tokens, *_ = await generate(pair.p, pair.d, make_spec("after", [5] * 60, pair.prefill.info))
        assert len(tokens) == 8
        await pair.p.until_idle()
        await pair.d.until_idle()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_decode_worker_that_dies_or_stops_lets_the_prefill_worker_go_on(
    pair: Pair, how: signal.Signals
) -> None:
    names = await pair.start_many(6)
    pair.decode.signal(how)
    for name in names:
        leg = await pair.p.ended(name)
        assert ended_well_or_to_be_tried_again(leg), leg.last.error.message
    await pair.p.until_idle()
    failed = await scrape(pair.prefill.info)
    assert failed["baton_transfer_failures_total{reason=lease_lost}"] > 0
    if how is signal.SIGSTOP:
        pair.decode.signal(signal.SIGCONT)
        await give_up_what_waits(pair.d, names)
        await pair.d.until_idle()
        tokens, *_ = await generate(pair.p, pair.d, make_spec("after", [5] * 60, pair.prefill.info))
        assert len(tokens) == 8
