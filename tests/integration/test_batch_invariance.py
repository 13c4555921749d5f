"""A request's tokens are the same alone, in company, in other chunks, preempted, and on a prefix hit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.engine.messages import ReserveCommand
from common.engine.model_runner import ModelRunner
from common.engine.scheduler import SchedulerConfig
from common.kernels.cpu.library import NativeUnavailableError
from common.kernels.cpu.loader import load_native_model
from common.kvcache.block_hash import hash_seed
from common.kvcache.block_pool import BlockPool
from common.kvcache.host_arena import HostArena
from common.kvcache.host_tier import HostTier
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.kvcache.layout import KvLayout
from common.kvcache.prefix_cache import PrefixCache
from common.model.interface import Model
from common.rpc.worker_messages import SequenceSpec, WorkerIdentity
from common.sampling_params import SamplingParams
from decode_service.preemption import Means
from decode_service.scheduler import DecodeScheduler
from tests.tiny_model import make_tiny_model
from tests.unit.engine_fakes import FakeKv, FakeReceiver

BLOCK_SIZE, CONTEXT, VOCAB, MAX_TOKENS = 8, 256, 300, 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.1, top_k=40, top_p=0.95, seed=1234)
PROMPT = random.Random(1).choices(range(3, VOCAB), k=61)


class Engine:
    """Scheduler, pool, host tier and native model, without thread and transfer: prompts are computed here."""

    def __init__(self, model: Model, *, num_blocks: int = 256, host_slots: int = 0, **config: Any) -> None:
        dtype = str(model.dtype).removeprefix("torch.")
        layout = KvLayout(model.config.num_layers, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim, dtype)
        kv_cache = KvCache(layout, num_blocks, torch.device("cpu"))
        self.runner = ModelRunner(model, kv_cache)
        self.pool = BlockPool(num_blocks)
        host = HostTier(host_slots, HostArena(kv_cache, host_slots)) if host_slots else None
        self.cache = PrefixCache(self.pool, host)
        values = {"chunk_budget_tokens": 512, "max_running": 16, "max_waiting": 64} | config
        self.scheduler = DecodeScheduler(
            SchedulerConfig(block_size=BLOCK_SIZE, vocab_size=VOCAB, max_model_len=CONTEXT, **values),
            self.pool, self.cache, FakeReceiver(FakeKv(1, BLOCK_SIZE)), "", WorkerIdentity("d", "e"), lambda _: None,
        )  # fmt: skip
        self.tokens: dict[str, list[int]] = {}
        self.num_cached_tokens: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        spec = SequenceSpec(name, name, prompt, len(prompt), hash_seed("m"), sampling, deadline=1e9)
        self.scheduler.handle(ReserveCommand(1, spec, prefill_here=True), 0.0)

    def step(self) -> bool:
        scheduled = self.scheduler.schedule(0.0)
        if scheduled:
            self.scheduler.complete(self.runner.execute(scheduled), 0.0)
        news = self.scheduler.take_news(None)
        for output in news.by_owner[1].outputs if news and 1 in news.by_owner else ():
            assert output.error is None, output.error
            self.tokens.setdefault(output.transfer_id, []).extend(output.token_ids)
            if output.leg_ended:
                self.num_cached_tokens[output.transfer_id] = output.num_cached_tokens
        return bool(scheduled)

    def run(self, name: str, prompt: list[int], sampling: SamplingParams) -> list[int]:
        self.add(name, prompt, sampling)
        while self.step():
            pass
        self.scheduler.check_integrity()
        return self.tokens[name]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = make_tiny_model(tmp_path_factory.mktemp("invariance") / "m", vocab_size=VOCAB)
    try:
        yield load_native_model(folder, TORCH_DTYPES[request.param], num_threads=2)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return request.param


@pytest.fixture
def alone(model: Model, sampling: SamplingParams) -> list[int]:
    tokens = Engine(model).run("t", PROMPT, sampling)
    assert len(tokens) == MAX_TOKENS
    return tokens


def others(engine: Engine, num: int = 7) -> None:
    """Of all lengths, greedy and sampled, in the batch before and after."""
    for i in range(num):
        prompt = random.Random(100 + i).choices(range(3, VOCAB), k=5 + 23 * i)
        engine.add(f"o{i}", prompt, GREEDY if i % 2 else SAMPLED)


def test_in_company_of_seven(model: Model, sampling: SamplingParams, alone: list[int]) -> None:
    engine = Engine(model)
    others(engine, 4)
    engine.step()
    engine.add("t", PROMPT, sampling)
    for _ in range(5):
        engine.step()
    others_late = random.Random(9).choices(range(3, VOCAB), k=90)
    for i in range(3):
        engine.add(f"late{i}", others_late[i * 30 :], GREEDY)
    while engine.step():
        pass
    assert engine.tokens["t"] == alone


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_in_other_chunks(model: Model, sampling: SamplingParams, alone: list[int], chunk: int) -> None:
    assert Engine(model, chunk_budget_tokens=chunk).run("t", PROMPT, sampling) == alone


@pytest.mark.parametrize("means", list(Means))
def test_preempted_over_and_over(model: Model, sampling: SamplingParams, alone: list[int], means: Means) -> None:
    """Its blocks are taken by others each time, so that its KV is computed anew, or comes back from host memory."""
    engine = Engine(model, num_blocks=CONTEXT // BLOCK_SIZE, host_slots=64 if means is Means.SWAP else 0)
    engine.add("t", PROMPT, sampling)
    for _ in range(3):
        for _ in range(4):
            engine.step()
        (sequence,) = engine.scheduler._running
        engine.scheduler._preempt(sequence, means)
        block_ids = engine.pool.allocate(engine.pool.num_blocks) or []
        assert len(block_ids) == engine.pool.num_blocks
        engine.pool.release(block_ids)
    while engine.step():
        pass
    assert engine.tokens["t"] == alone
    loaded = engine.cache.host_stats.num_loaded_total
    assert (loaded >= 3 * (len(PROMPT) // BLOCK_SIZE)) == (means is Means.SWAP)


def test_preempted_by_want_of_blocks(model: Model, sampling: SamplingParams, alone: list[int]) -> None:
    engine = Engine(model, num_blocks=32)
    others(engine, 3)
    engine.add("t", PROMPT, sampling)
    while engine.step():
        pass
    assert engine.tokens["t"] == alone


@pytest.mark.parametrize("tier", ["pool", "host"])
def test_on_a_prefix_hit(model: Model, sampling: SamplingParams, alone: list[int], tier: str) -> None:
    """The prefix was computed by a longer prompt, in one chunk."""
    engine = Engine(model, num_blocks=64, host_slots=64)
    engine.run("first", [*PROMPT, *PROMPT], GREEDY)
    if tier == "host":
        engine.pool.release(engine.pool.allocate(64) or [])
    assert engine.run("t", PROMPT, sampling) == alone
    assert engine.num_cached_tokens["t"] == 56
    assert (engine.cache.host_stats.num_loaded_total > 0) == (tier == "host")
