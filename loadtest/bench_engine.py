"""Times the engine's forward pass alone: decode steps and prompts, native executor against the torch reference.

    python -m loadtest.bench_engine --model DIR [--dtype float32] [--quantization int8] [--threads 2] [--reference]

One line a case: least and median time, what the least time means in GB/s (weights, as though not quantised, and KV read
once) and GFLOP/s, its ratio to the goal for two free cores (bfloat16, not quantised), and how many times the
reference's time it saves. On a shared machine the least time is the one to trust, and ratios within one run more than
times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from common.engine.batch import Batch, ScheduledSequence, build_batch
from common.kernels.cpu.loader import load_native_model
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.kvcache.layout import DTYPE_BYTES, KvLayout
from common.model.config import ModelConfig
from common.model.interface import Model
from common.model.loader import load_model
from common.model.quantization import parse_quantization
from common.sampling_params import SamplingParams

BLOCK_SIZE: Final = 16
_GREEDY: Final = SamplingParams(max_tokens=1, temperature=0.0)
# Goals in ms for SmolLM2-135M in bfloat16 on two cores with AVX512-BF16: decode by batch size, prompts by length.
_DECODE_GOALS: Final[dict[int, float | None]] = {1: 8.0, 4: None, 8: None, 16: 12.5}
_PREFILL_GOALS: Final[dict[int, float | None]] = {128: None, 1024: 620.0, 4096: 3500.0}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: `sequences` of `new_tokens` each, after which each has `context` tokens."""

    name: str
    sequences: int
    new_tokens: int
    context: int
    goal_ms: float | None

    def batch(self) -> Batch:
        per_sequence = -(-self.context // BLOCK_SIZE)
        scheduled = [
            ScheduledSequence(
                [(7 * i + s) % 1000 for i in range(self.new_tokens)],
                self.context - self.new_tokens,
                range(s * per_sequence, (s + 1) * per_sequence),
                _GREEDY,
            )
            for s in range(self.sequences)
        ]
        return build_batch(scheduled, BLOCK_SIZE, torch.device("cpu"))

    def flops(self, config: ModelConfig) -> float:
        """Multiplications and additions of the matrix products and of causal attention."""
        tokens = self.sequences * self.new_tokens
        seen = self.context - (self.new_tokens - 1) / 2
        attention = 4 * seen * config.num_heads * config.head_dim * config.num_layers
        head = config.vocab_size * config.hidden_size
        return tokens * (2 * (num_weights(config) - head) + attention) + self.sequences * 2 * head

    def bytes_read(self, config: ModelConfig, dtype: str) -> float:
        """Weights once, as though not quantised, and each sequence's KV once."""
        kv = 2 * self.sequences * self.context * config.kv_size * config.num_layers
        return (num_weights(config) + kv) * DTYPE_BYTES[dtype]


def num_weights(config: ModelConfig) -> int:
    """Of the matrices that a step multiplies with: the layers' and the output head."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size


def cases(context: int) -> list[Case]:
    decodes = [Case(f"decode, batch {n}, context {context}", n, 1, context, goal) for n, goal in _DECODE_GOALS.items()]
    prefills = [Case(f"prefill {n}", 1, n, n, goal) for n, goal in _PREFILL_GOALS.items()]
    return decodes + prefills


def times_ms(run: Callable[[], object], budget_s: float) -> list[float]:
    """After one run to warm up: at least three, and as many as fit into the budget."""
    run()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(model: Model, case: Case, budget_s: float) -> tuple[float, float]:
    """Least and median milliseconds of the step."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    layout = KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
    cache = KvCache(layout, case.sequences * -(-case.context // BLOCK_SIZE), torch.device("cpu"))
    batch = case.batch()
    with torch.inference_mode():
        times = times_ms(lambda: model.forward(batch, cache), budget_s)
    return min(times), statistics.median(times)


def report_line(case: Case, model: Model, best: float, median: float, reference_ms: float | None) -> str:
    dtype = str(model.dtype).removeprefix("torch.")
    gigabytes = case.bytes_read(model.config, dtype) / best / 1e6
    gigaflops = case.flops(model.config) / best / 1e6
    goal = f"{best / case.goal_ms:5.2f} of {case.goal_ms:.0f} ms" if case.goal_ms and dtype == "bfloat16" else "-"
    saved = f"{reference_ms / best:.1f}x ({reference_ms:.1f} ms)" if reference_ms else "-"
    return f"{case.name:<30}{best:>9.2f}{median:>10.2f}{gigabytes:>8.1f}{gigaflops:>9.0f}  {goal:<18}{saved}"


def main(
    model: Annotated[Path, typer.Option(help="a Hugging Face folder")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="of both executors")] = 2,
    context: Annotated[int, typer.Option(help="tokens of each decoding sequence")] = 200,
    budget_s: Annotated[float, typer.Option(help="seconds a case")] = 3.0,
    quantization: Annotated[str, typer.Option(help="none, int8 or int4")] = "none",
    reference: Annotated[bool, typer.Option(help="time the torch reference too")] = False,
) -> None:
    """Time decode steps and prompts on one model."""
    torch.set_num_threads(threads)
    held = parse_quantization(quantization)
    native = load_native_model(model, TORCH_DTYPES[dtype], threads, quantization=held)
    cpu = torch.device("cpu")
    plain = load_model(model, TORCH_DTYPES[dtype], cpu, quantization=held) if reference else None
    typer.echo(
        f"{dtype}, quantization {held}, {threads} threads; the executor holds {native.memory_bytes / 1e6:.0f} MB"
    )
    typer.echo(f"{'':<30}{'least ms':>9}{'median':>10}{'GB/s':>8}{'GFLOP/s':>9}  {'of the goal':<18}reference takes")
    for case in cases(context):
        best, median = measure(native, case, budget_s)
        reference_ms = measure(plain, case, budget_s)[0] if plain is not None else None
        typer.echo(report_line(case, native, best, median, reference_ms))


if __name__ == "__main__":
    typer.run(main)
