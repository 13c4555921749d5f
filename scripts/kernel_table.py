"""Compiles every Triton kernel ahead of time, for GPUs that this machine need not have, and writes what they take.

    python scripts/kernel_table.py            writes docs/KERNELS_TABLE.md
    python scripts/kernel_table.py --arch 90  compiles for one architecture and writes nothing

Triton's own compiler and ptxas do the work; registers, stack and shared memory are read back from the cubin.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.kernels.triton import attention, block_copy, experts, pointwise, sampler, sampling

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "KERNELS_TABLE.md"
ARCHITECTURES = (80, 90, 100)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# By argument name; pointers to what is not named here hold the model's dtype, and scalars are 32 bits wide.
POINTERS = {
    "starts_ptr": "*i32", "lens_ptr": "*i32", "tables_ptr": "*i32", "lse_ptr": "*fp32", "part_ptr": "*fp32",
    "slots_ptr": "*i64", "ids_ptr": "*i64", "order_ptr": "*i64", "likings_ptr": "*fp32", "logits_ptr": "*fp32",
    "keys_ptr": "*i64", "temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp64", "least_ptr": "*fp32",
    "tokens_ptr": "*i64", "logprob_ptr": "*fp32", "rank_ptr": "*i32",
}  # fmt: skip
FLOATS = {"eps", "scale"}
# As with the sizes of real models: Triton compiles anew for multiples of 16, into wider loads.
MULTIPLES_OF_16 = {"n", "k", "q_row", "qkv_row", "x_row", "x_head", "words", "pool_layer", "vocab", "block_size"}


@dataclass(frozen=True, slots=True)
class Variant:
    """overrides: types of pointers that differ from POINTERS."""

    kernel: Any
    case: str
    dtype: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    overrides: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    registers: int
    stack_bytes: int
    shared_bytes: int


def variants() -> Iterator[Variant]:
    for head_dim, group, dtype in (
        (64, 3, "bf16"),
        (80, 1, "bf16"),
        (96, 4, "bf16"),
        (128, 8, "bf16"),
        (128, 4, "fp32"),
    ):
        block, kept = triton.next_power_of_2(head_dim), torch.float32 if dtype == "fp32" else torch.bfloat16
        case = f"head_dim {head_dim}, {group} queries a KV head"
        precision = "tf32x3" if dtype == "fp32" else "tf32"
        tiles = {
            "D": head_dim,
            "BLOCK_D": block,
            "G": group,
            "TILE": attention.TILE_TOKENS[kept],
            "PRECISION": precision,
        }
        split = {"SPLIT": attention.SPLIT_TOKENS}
        parts = (("out_ptr", "*fp32"),)
        yield Variant(attention.decode_kernel, case, dtype, {**tiles, **split, "ROWS": 16}, 4, 2, parts)
        rows = {"ROWS": attention.CHUNK_ROWS[kept], "TOKENS": attention.CHUNK_ROWS[kept] // group}
        yield Variant(attention.chunk_kernel, case, dtype, {**tiles, **rows}, 4, 2)
    yield Variant(
        attention.merge_kernel, "head_dim 128", "bf16", {"D": 128, "BLOCK_D": 128, "SPLIT": attention.SPLIT_TOKENS}, 1
    )
    for hidden in (4096, 12288):
        block = triton.next_power_of_2(hidden)
        warps = min(16, block // 512)
        case = f"hidden {hidden}"
        yield Variant(pointwise.rms_norm_kernel, f"add, {case}", "bf16", {"ADD": True, "BLOCK": block}, warps)
    yield Variant(pointwise.rms_norm_kernel, "head_dim 128", "bf16", {"ADD": False, "BLOCK": 128}, 1)
    yield Variant(pointwise.rope_write_kv_kernel, "head_dim 128", "bf16", {"D": 128, "BLOCK": 64}, 1)
    yield Variant(pointwise.silu_mul_kernel, "any width", "bf16", {"BLOCK": 1024}, 4)
    for tile in (16, 64):
        shape = {"TILE": tile, "BLOCK_N": 64, "BLOCK_K": 64, "PRECISION": "tf32"}
        yield Variant(experts.expert_gate_up_kernel, f"tiles of {tile} rows", "bf16", shape, 4)
        yield Variant(experts.expert_down_kernel, f"tiles of {tile} rows", "bf16", shape, 4)
    for into_pool in (False, True):
        case = "scatter" if into_pool else "gather"
        yield Variant(block_copy.copy_blocks_kernel, case, "i64", {"INTO_POOL": into_pool, "BLOCK": 1024}, 4)
    drawn = {"BLOCK": sampler.BLOCK_TOKENS, "RUN": sampler.RUN_TOKENS}
    yield Variant(sampling.sample_kernel, "any vocabulary", "fp32", drawn, 8, 3, (("out_ptr", "*i64"),))
    yield Variant(sampling.logprobs_kernel, "any vocabulary", "fp32", {"BLOCK": sampler.BLOCK_TOKENS}, 8)


def compile_for(variant: Variant, architecture: int) -> Usage:
    """Raises what Triton or ptxas raise where it doesn't compile."""
    names = variant.kernel.arg_names
    special = POINTERS | dict(variant.overrides)

    def type_of(name: str) -> str:
        if name in variant.constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return special.get(name, f"*{variant.dtype}")
        return "fp32" if name in FLOATS else "i32"

    signature = {name: type_of(name) for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name in MULTIPLES_OF_16
    }
    compiled = triton.compile(
        ASTSource(variant.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run([CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = re.search(rf"Function {variant.kernel.__name__}:\s*REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of {variant.kernel.__name__}: {report}")
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared)


def page() -> str:
    lines = [
        "# What the Triton kernels take",
        "",
        f"Made by `python scripts/kernel_table.py` with Triton {triton.__version__}: compiled ahead of time,",
        "on a machine without a GPU. Per architecture: registers a thread / bytes of stack a thread, where spills go",
        "(0: none) / bytes of shared memory a program. What the kernels do: [KERNELS.md](KERNELS.md).",
        "",
        f"| kernel | case | dtype | warps | {' | '.join(f'sm_{a}' for a in ARCHITECTURES)} |",
        f"|{'---|' * (4 + len(ARCHITECTURES))}",
    ]
    for variant in variants():
        used = [compile_for(variant, architecture) for architecture in ARCHITECTURES]
        cells = " | ".join(f"{u.registers} / {u.stack_bytes} / {u.shared_bytes:,}" for u in used)
        name = variant.kernel.__name__
        lines.append(f"| `{name}` | {variant.case} | {variant.dtype} | {variant.num_warps} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, help="compile for this one, write nothing")
    arch = parser.parse_args().arch
    if arch is None:
        PAGE.write_text(page())
        return 0
    for variant in variants():
        print(variant.kernel.__name__, variant.case, compile_for(variant, arch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
