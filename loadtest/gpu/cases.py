"""What is checked and timed on a GPU: each kernel, the torch reference on the same tensors, and its least traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from common.engine.batch import Batch, ScheduledSequence, build_batch
from common.engine.sampler import Sampler
from common.kernels.reference import ReferenceKernels
from common.kernels.triton.block_copy import gather_blocks
from common.kernels.triton.kernels import TritonKernels
from common.kernels.triton.sampler import TritonSampler
from common.sampling_params import SamplingParams

BLOCK_SIZE = 16
TRITON, REFERENCE = TritonKernels(), ReferenceKernels()
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """ours, reference: both pure. peer: what else computes it, for time alone. moved_bytes, flops: the least there is
    to move and to multiply. tolerance: largest error, relative to the largest value; 0: equal."""

    name: str
    ours: Run
    reference: Run
    tolerance: float
    moved_bytes: int
    flops: int = 0
    peer: Run | None = None


def cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    """small: shapes that an interpreter gets through."""
    yield from _pointwise(device, small)
    heads = ((4, 2, 64),) if small else ((32, 8, 128), (9, 3, 64), (32, 32, 80), (24, 8, 96))
    for num_heads, num_kv_heads, head_dim in heads:
        for dtype in (torch.bfloat16, torch.float32):
            shape = (num_heads, num_kv_heads, head_dim, dtype, device)
            yield _attention("decode", [(40, 1), (7, 1)] if small else [(4095, 1)] * 32, *shape)
            yield _attention("chunk", [(9, 20)] if small else [(2048, 2048)], *shape)
    if not small:
        yield _attention("decode, ragged", [(97 * i, 1) for i in range(64)], 32, 8, 128, torch.bfloat16, device)
        yield _attention("mixed", [(300, 1), (0, 777), (5000, 1), (33, 64)], 32, 8, 128, torch.bfloat16, device)
    yield _experts(device, small)
    yield _sampling(device, small)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def _pointwise(device: torch.device, small: bool) -> Iterator[Case]:
    rows, hidden, dtype = (3, 90, torch.bfloat16) if small else (4096, 8192, torch.bfloat16)
    x, residual, weight = (_random(device, dtype, *shape) for shape in ((rows, hidden), (rows, hidden), (hidden,)))
    size = x.numel() * x.element_size()
    yield Case(
        "add + RMSNorm",
        lambda: TRITON.add_rms_norm(x, residual.clone(), weight, 1e-5),
        lambda: REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-5),
        0.02,
        6 * size,  # the copy of the residual counts too: it is timed
    )
    gate_up = _random(device, dtype, rows, 2 * hidden)
    yield Case("SiLU-mul", lambda: TRITON.silu_mul(gate_up), lambda: REFERENCE.silu_mul(gate_up), 0.02, 3 * size)
    yield _rope(device, 2 if small else 4096)
    words = torch.randint(0, 1 << 40, (2, 9, 70) if small else (32, 512, 8192), device=device)
    ids = torch.randperm(words.shape[1], device=device)[: words.shape[1] // 2]
    moved = 2 * words.shape[0] * len(ids) * words.shape[2] * 8
    yield Case("block gather", lambda: gather_blocks(words, ids), lambda: words.index_select(1, ids), 0.0, moved)


def _rope(device: torch.device, rows: int) -> Case:
    num_heads, num_kv_heads, head_dim = 32, 8, 128
    qkv = _random(device, torch.bfloat16, rows, num_heads + 2 * num_kv_heads, head_dim)
    angles = torch.rand(rows, head_dim // 2, device=device)
    rotation = (angles.cos().bfloat16(), angles.sin().bfloat16())
    pool = torch.zeros(rows // BLOCK_SIZE + 1, 2, num_kv_heads, BLOCK_SIZE, head_dim, device=device).bfloat16()
    slots = torch.randperm(rows, device=device)

    def run(kernels: TritonKernels | ReferenceKernels) -> torch.Tensor:
        rotated = qkv.clone()
        kernels.rope_write_kv(rotated, num_heads, rotation, pool, slots)
        return torch.cat([rotated.flatten(), pool.flatten()])

    # Copy, rotation and concatenation: what the two closures share is timed with them.
    moved = 2 * (3 * qkv.numel() + 2 * pool.numel())
    return Case("RoPE + KV write", lambda: run(TRITON), lambda: run(REFERENCE), 0.02, moved)


def _step(shapes: list[tuple[int, int]], device: torch.device) -> tuple[Batch, int]:
    counts = [-(-(start + new) // BLOCK_SIZE) for start, new in shapes]
    ids = torch.randperm(sum(counts)).tolist()
    scheduled = [
        ScheduledSequence([0] * new, start, [ids.pop() for _ in range(count)])
        for (start, new), count in zip(shapes, counts, strict=True)
    ]
    return build_batch(scheduled, BLOCK_SIZE, device), sum(counts)


def _attention(
    name: str, shapes: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Case:  # fmt: skip
    batch, num_blocks = _step(shapes, device)
    pool = _random(device, dtype, num_blocks, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    q = _random(device, dtype, batch.token_ids.numel(), num_heads, head_dim)
    plans = TRITON.plan_attention(batch, BLOCK_SIZE, dtype), REFERENCE.plan_attention(batch, BLOCK_SIZE, dtype)
    scale = head_dim**-0.5
    pairs = sum(new * start + new * (new + 1) // 2 for start, new in shapes)
    tokens = sum(start + new for start, new in shapes)
    return Case(
        f"{name} {num_heads}/{num_kv_heads}×{head_dim} {str(dtype).removeprefix('torch.')}",
        lambda: TRITON.attention(q, pool, plans[0], scale),
        lambda: REFERENCE.attention(q, pool, plans[1], scale),
        0.02 if dtype == torch.bfloat16 else 2e-4,
        (2 * tokens * num_kv_heads * head_dim + 2 * q.numel()) * q.element_size(),
        4 * pairs * num_heads * head_dim,
        _dense_peer(shapes, num_heads, num_kv_heads, head_dim, dtype, device),
    )


def _dense_peer(
    shapes: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Run | None:  # fmt: skip
    """torch's scaled_dot_product_attention on KV that lies dense, where all sequences are alike."""
    start, new = shapes[0]
    if any(shape != (start, new) for shape in shapes):
        return None
    q = _random(device, dtype, len(shapes), num_heads, new, head_dim)
    k, v = (_random(device, dtype, len(shapes), num_kv_heads, start + new, head_dim) for _ in range(2))
    mask = None
    if new > 1:
        mask = torch.ones(new, start + new, dtype=torch.bool, device=device).tril_(start)
    return lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _experts(device: torch.device, small: bool) -> Case:
    rows, hidden, inner, experts, each = (5, 24, 40, 4, 2) if small else (64, 4096, 14336, 8, 2)
    x = _random(device, torch.bfloat16, rows, hidden)
    router = _random(device, torch.bfloat16, experts, hidden)
    gate_up = _random(device, torch.bfloat16, experts, 2 * inner, hidden).mul_(hidden**-0.5)
    down = _random(device, torch.bfloat16, experts, hidden, inner).mul_(inner**-0.5)
    return Case(
        "mixture of experts",
        lambda: TRITON.mixture_of_experts(x, router, gate_up, down, each),
        lambda: REFERENCE.mixture_of_experts(x, router, gate_up, down, each),
        0.05,
        2 * (gate_up.numel() + down.numel()),
        6 * rows * each * hidden * inner,
    )


def _sampling(device: torch.device, small: bool) -> Case:
    rows, vocab = (6, 700) if small else (64, 128256)
    logits = 3 * _random(device, torch.float32, rows, vocab)
    kinds: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.95},
        {"min_p": 0.05},
        {"temperature": 0.0},
        {},
    )
    wanted = [SamplingParams(max_tokens=1, seed=i, **{"temperature": 0.8, **kinds[i % 5]}) for i in range(rows)]
    samplers = TritonSampler(), Sampler()

    def run(sampler: TritonSampler | Sampler) -> torch.Tensor:
        return torch.tensor([-1 if t is None else t for t in sampler.sample(logits, wanted, range(rows))])

    return Case("sampling", lambda: run(samplers[0]), lambda: run(samplers[1]), 0.0, 4 * logits.numel())
