"""What preemption and the host tier cost and save, on the engine alone: `python -m loadtest.bench_kv --model FOLDER`.

    pressure    24 streams on too few blocks: recompute the youngest (what most engines do), the choice by predicted
                cost, and that choice with a host tier to swap to
    sessions    chats of several turns, more of them than the pool can keep: with and without a host tier
    mixed       8 streams while long prompts are computed beside them: chunks of one size, and by a target for the step

All in one run, on one copy of the weights. docs/SCHEDULING.md has results.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from common.engine.cost_rates import CostRates
from common.engine.messages import ReserveCommand
from common.engine.model_runner import ModelRunner
from common.engine.scheduler import SchedulerConfig
from common.errors import BatonError, ErrorKind
from common.kernels.cpu.loader import load_native_model
from common.kvcache.block_hash import hash_seed
from common.kvcache.block_pool import BlockPool
from common.kvcache.host_arena import HostArena
from common.kvcache.host_tier import HostTier
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.kvcache.layout import KvLayout
from common.kvcache.prefix_cache import PrefixCache
from common.model.interface import Model
from common.rpc.worker_messages import LoadReport, SequenceSpec, WorkerIdentity
from common.sampling_params import SamplingParams
from common.worker.calibration import measure_rates
from decode_service.preemption import VictimPolicy, choose_victim, youngest
from decode_service.scheduler import DecodeScheduler
from kv_transfer.types import ReceiverCallbacks

BLOCK_SIZE: Final = 16
CHUNK_TOKENS: Final = 256
CONTEXT: Final = 2048
NO_DEADLINE: Final = float("inf")


class _NoTransfers:
    """A ReservationBook for an engine that computes all prompts itself."""

    def reserve(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        num_cached_tokens: int,
        callbacks: ReceiverCallbacks,
        timeout_s: float,
    ) -> bytes:
        raise BatonError(ErrorKind.INTERNAL, "this engine expects no KV from elsewhere")

    def release(self, transfer_id: str) -> None:
        """There is nothing to release."""


@dataclass
class Trace:
    """What a run showed. Seconds since its start."""

    first_token_at: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_computed_tokens: int = 0


class BenchEngine:
    """Scheduler, pool, tier and model in the calling thread; prompts are computed here."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        host_slots: int,
        rates: CostRates,
        policy: VictimPolicy,
        step_target_s: float = 0.0,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        kv_cache = new_kv_cache(model, num_blocks)
        pool = BlockPool(num_blocks)
        host = HostTier(host_slots, HostArena(kv_cache, host_slots)) if host_slots else None
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            vocab_size=model.config.vocab_size,
            max_model_len=min(CONTEXT, num_blocks * BLOCK_SIZE),
            chunk_budget_tokens=chunk_tokens,
            step_target_s=step_target_s,
            max_running=64,
            max_waiting=1024,
            rates=rates,
        )
        identity = WorkerIdentity("bench", "0")
        self._runner = ModelRunner(model, kv_cache)
        self._scheduler = DecodeScheduler(
            config, pool, PrefixCache(pool, host), _NoTransfers(), "", identity, lambda _: None, victim_policy=policy
        )
        self.load = LoadReport()
        self.trace = Trace()

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        spec = SequenceSpec(name, name, prompt, len(prompt), hash_seed("bench"), sampling, NO_DEADLINE)
        self._scheduler.handle(ReserveCommand(1, spec, prefill_here=True), 0.0)

    def run(self) -> float:
        """Until nothing is left to do; returns the seconds."""
        began = time.perf_counter()
        while self.step():
            self.hear(time.perf_counter() - began)
        return time.perf_counter() - began

    def step(self) -> int:
        """Tokens that it computed; 0: there was nothing to do."""
        scheduled = self._scheduler.schedule(time.perf_counter())
        if scheduled:
            self._scheduler.complete(self._runner.execute(scheduled), time.perf_counter())
        num_tokens = sum(len(s.token_ids) for s in scheduled)
        self.trace.num_computed_tokens += num_tokens
        return num_tokens

    def hear(self, now: float) -> None:
        """Take in what the last step brought about, at `now`."""
        news = self._scheduler.take_news(None)
        if news is None:
            return
        self.load = news.load
        for owner_news in news.by_owner.values():
            for output in owner_news.outputs:
                if output.error is not None:
                    raise output.error
                if output.token_ids:
                    self.trace.first_token_at.setdefault(output.transfer_id, now)
                    self.trace.tokens.setdefault(output.transfer_id, []).extend(output.token_ids)


def new_kv_cache(model: Model, num_blocks: int) -> KvCache:
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    layout = KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
    return KvCache(layout, num_blocks, torch.device("cpu"))


def random_prompt(chance: random.Random, length: int, vocab_size: int) -> list[int]:
    return [chance.randrange(vocab_size) for _ in range(length)]


def pressure(model: Model, rates: CostRates, *, num_blocks: int, streams: int, output_tokens: int) -> None:
    """`streams` requests at once, prompts of 64 to 640 tokens; the KV of all at their ends needs more than the pool."""
    chance = random.Random(3)
    prompts = [random_prompt(chance, chance.randrange(64, 640), model.config.vocab_size) for _ in range(streams)]
    need = sum(-(-(len(prompt) + output_tokens - 1) // BLOCK_SIZE) for prompt in prompts)
    typer.echo(f"\npressure: {streams} streams, {output_tokens} tokens each; they need {need} blocks of {num_blocks}")
    typer.echo(f"{'':<26}{'s':>7}{'tokens/s':>10}{'preempted':>11}{'swapped':>9}{'computed twice':>16}")
    least = sum(len(prompt) + output_tokens - 1 for prompt in prompts)
    texts: list[dict[str, list[int]]] = []
    for name, host_slots, policy in (
        ("recompute the youngest", 0, youngest),
        ("by cost, no host tier", 0, choose_victim),
        ("by cost, host tier", need, choose_victim),
    ):
        engine = BenchEngine(model, num_blocks, host_slots, rates, policy)
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, output_tokens)
        seconds = engine.run()
        load, again = engine.load, engine.trace.num_computed_tokens - least
        typer.echo(
            f"{name:<26}{seconds:>7.1f}{streams * output_tokens / seconds:>10.1f}{load.num_preemptions_total:>11}"
            f"{load.num_swapped_total:>9}{again:>16}"
        )
        texts.append(engine.trace.tokens)
    typer.echo(f"texts equal: {all(text == texts[0] for text in texts)}")


def sessions(model: Model, rates: CostRates, *, num_blocks: int, chats: int, turns: int) -> None:
    """`chats` conversations take turns, one request at a time; each turn brings 160 new tokens and 16 answered."""
    typer.echo(f"\nsessions: {chats} chats of {turns} turns, one after the other, in {num_blocks} blocks")
    typer.echo(f"{'':<26}{'TTFT p50 ms':>13}{'p95 ms':>9}{'hit rate':>10}{'of it host':>12}")
    texts: list[list[list[int]]] = []
    for name, host_slots in (("no host tier", 0), ("host tier", 4 * num_blocks)):
        chance = random.Random(4)
        engine = BenchEngine(model, num_blocks, host_slots, rates, choose_victim)
        histories: list[list[int]] = [[] for _ in range(chats)]
        times_ms = []
        for turn in range(turns):
            for chat, history in enumerate(histories):
                history += random_prompt(chance, 160, model.config.vocab_size)
                transfer_id = f"{chat}-{turn}"
                engine.add(transfer_id, list(history), 16)
                engine.run()
                history += engine.trace.tokens[transfer_id]
                if turn:
                    times_ms.append(engine.trace.first_token_at[transfer_id] * 1e3)
        load = engine.load
        hits, queries = load.prefix_hits_total, load.prefix_queries_total
        p95 = statistics.quantiles(times_ms, n=20)[-1]
        typer.echo(
            f"{name:<26}{statistics.median(times_ms):>13.1f}{p95:>9.1f}{hits / queries:>10.2f}"
            f"{load.prefix_host_hits_total / max(1, hits):>12.2f}"
        )
        texts.append(histories)
    typer.echo(f"texts equal: {texts[0] == texts[1]}")


def mixed(model: Model, rates: CostRates) -> None:
    """Steps while 8 streams decode and four prompts of 1,024 tokens are computed one after the other."""
    typer.echo("\nmixed: 8 streams beside prompts of 1,024 tokens")
    typer.echo(f"{'':<26}{'step p50 ms':>13}{'p95 ms':>9}{'prompt tokens/s':>17}{'last budget':>13}")
    for name, target_s, ceiling in (
        ("256 tokens a step", 0.0, 256),
        ("target 50 ms", 0.05, 1024),
        ("target 25 ms", 0.025, 1024),
    ):
        chance = random.Random(5)
        engine = BenchEngine(model, 1024, 0, rates, choose_victim, target_s, ceiling)
        for i in range(8):
            engine.add(f"s{i}", random_prompt(chance, 128, model.config.vocab_size), 1024)
        for _ in range(48):
            engine.step()
        for i in range(4):
            engine.add(f"p{i}", random_prompt(chance, 1024, model.config.vocab_size), 1)
        times_ms, num_chunk_tokens = [], 0
        while (began := time.perf_counter()) and (num_tokens := engine.step()) > 8:
            times_ms.append((time.perf_counter() - began) * 1e3)
            num_chunk_tokens += num_tokens - 8
            engine.hear(0.0)
        p95 = statistics.quantiles(times_ms, n=20)[-1]
        speed = num_chunk_tokens / sum(times_ms) * 1e3
        typer.echo(
            f"{name:<26}{statistics.median(times_ms):>13.1f}{p95:>9.1f}{speed:>17.0f}{engine.load.chunk_budget_tokens:>13}"
        )


def main(
    model: Annotated[Path, typer.Option(help="a Hugging Face folder")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="of the executor")] = 2,
    streams: Annotated[int, typer.Option(help="of the pressure run")] = 24,
    output_tokens: Annotated[int, typer.Option(help="of each of them")] = 192,
    blocks: Annotated[int, typer.Option(help="of the pool, pressure")] = 320,
    chats: Annotated[int, typer.Option(help="of the sessions run")] = 12,
    turns: Annotated[int, typer.Option(help="of each of them")] = 4,
) -> None:
    """Time a short pool with three ways to preempt, and chats with and without a host tier."""
    torch.set_num_threads(1)
    native = load_native_model(model, TORCH_DTYPES[dtype], threads)
    kv_cache = new_kv_cache(native, 16)
    runner = ModelRunner(native, kv_cache)
    runner.warm_up(64)
    rates = measure_rates(runner, kv_cache, native.config)
    typer.echo(f"{dtype}, {threads} threads, {rates}")
    pressure(native, rates, num_blocks=blocks, streams=streams, output_tokens=output_tokens)
    sessions(native, rates, num_blocks=blocks // 2, chats=chats, turns=turns)
    mixed(native, rates)


if __name__ == "__main__":
    typer.run(main)
