"""Print docs/SIZING.md: python scripts/sizing_page.py > docs/SIZING.md"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.sizing import USABLE_RATIO, ModelShape, num_gpu_blocks, prefill_s, transfer_s

SHAPES: Final = {
    "Llama-3-70B": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
    "Mixtral-8x22B": ModelShape(56, 6144, 16384, 48, 8, 128, 32000, num_experts=8, num_experts_per_token=2),
    "175B dense (GPT-3's shape)": ModelShape(
        96, 12288, 49152, 96, 96, 128, 50257, mlp_matrices=2, is_tied=True, num_positions=2048
    ),
}
GPUS: Final = {"H100 (80 GB)": 80e9, "H200 (141 GB)": 141e9}
GIGABITS: Final = (50, 100, 400)
TENSOR_PARALLEL: Final = 8
BLOCK_SIZE: Final = 16
BFLOAT16: Final = 2
# H100 SXM, dense bfloat16, of which half is reached.
FLOPS_PER_S: Final = TENSOR_PARALLEL * 989e12 * 0.5


def page() -> str:
    return f"""\
# Sizing

Made by `python scripts/sizing_page.py` from `common/sizing.py`; do not edit. bfloat16 weights and KV, blocks of
{BLOCK_SIZE} tokens, {TENSOR_PARALLEL} GPUs a worker, of whose memory {USABLE_RATIO:.0%} is for weights and KV.
Computed, not measured.

## Memory

| model | weights | KV a token | {" | ".join(f"blocks a group of {gpu}" for gpu in GPUS)} |
|---|---|---|{"---|" * len(GPUS)}
{_rows(_memory)}

A group's block holds all heads of {BLOCK_SIZE} tokens, an eighth on each GPU; in brackets the tokens of all blocks.

## What disaggregation sends

KV of 1,000 prompt tokens, and the time it takes at the line rate of one network card.

| model | bytes | {" | ".join(f"{rate} Gb/s" for rate in GIGABITS)} | prefill of them | overhead at 400 Gb/s |
|---|---|{"---|" * len(GIGABITS)}---|---|
{_rows(_network)}

Prefill: two FLOPs a weight and token on eight H100 at half their peak (8 × 495 TFLOP/s), attention left out. Overhead
is transfer over prefill, were nothing overlapped; chunks are sent while the next ones are computed, so that below
100 % it costs the tail of the last chunk only. Above 100 % the network bounds the prefill worker: there placement
prefers cached prefixes, and decode workers that compute short prompts themselves ([PLACEMENT.md](PLACEMENT.md)).
"""


def _rows(cells: Callable[[ModelShape], list[str]]) -> str:
    return "\n".join(f"| {name} | {' | '.join(cells(shape))} |" for name, shape in SHAPES.items())


def _memory(shape: ModelShape) -> list[str]:
    def blocks(memory_bytes: float) -> str:
        found = num_gpu_blocks(
            shape,
            memory_bytes=memory_bytes,
            tensor_parallel=TENSOR_PARALLEL,
            block_size=BLOCK_SIZE,
            value_bytes=BFLOAT16,
        )
        return f"{found:,} ({found * BLOCK_SIZE:,})"

    weights = f"{shape.num_weights() * BFLOAT16 / 1e9:.1f} GB ({shape.num_weights() / 1e9:.2f} G)"
    return [weights, f"{shape.kv_token_bytes(BFLOAT16):,} B", *map(blocks, GPUS.values())]


def _network(shape: ModelShape) -> list[str]:
    token_bytes = shape.kv_token_bytes(BFLOAT16)
    compute_s = prefill_s(shape, 1000, FLOPS_PER_S)
    times = [f"{1e3 * transfer_s(1000, token_bytes, rate):.1f} ms" for rate in GIGABITS]
    overhead = f"{transfer_s(1000, token_bytes, 400) / compute_s:.0%}"
    return [f"{token_bytes / 1e3:,.0f} MB", *times, f"{1e3 * compute_s:.1f} ms", overhead]


if __name__ == "__main__":
    print(page(), end="")
