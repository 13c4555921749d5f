"""A mixture of experts as two grouped matrix products, without a copy to the host: grids depend on shapes alone.

Assignments (token, choice) are sorted by expert; a tile holds those of one expert (owner_of in attention.py):

    sorted    | e0 e0 e0 | e1 | e3 e3 |        starts [E + 1]   0 3 4 4 6
    tiles     | ████████ | ██ | ██    |        of TILE rows, the last of an expert's filled up
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from common.kernels.triton.attention import owner_of
from common.kernels.triton.dot import dot, precision_of


@triton.jit
def expert_gate_up_kernel(
    x_ptr, weight_ptr, starts_ptr, order_ptr, out_ptr, num_experts, each, k, n,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns): silu(x · gateᵀ) * (x · upᵀ) of the tile's rows. weight: [E, 2 * n, k].
    out: [assignments, n], in sorted order."""
    expert, tile = owner_of(tl.program_id(0), starts_ptr, num_experts, TILE)
    first, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    if first + tile * TILE < end:
        row = first + tile * TILE + tl.arange(0, TILE)
        inside = row < end
        token = tl.load(order_ptr + row, mask=inside, other=0) // each
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        gate = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
        weights = weight_ptr + expert.to(tl.int64) * 2 * n * k + column[None, :].to(tl.int64) * k
        for start in range(0, k, BLOCK_K):
            at = start + depth
            x = tl.load(x_ptr + token[:, None] * k + at[None, :], mask=inside[:, None] & (at < k)[None, :], other=0.0)
            mask = (at < k)[:, None] & (column < n)[None, :]
            w = tl.load(weights + at[:, None], mask=mask, other=0.0)
            gate += dot(x, w, PRECISION)
            w = tl.load(weights + n.to(tl.int64) * k + at[:, None], mask=mask, other=0.0)
            up += dot(x, w, PRECISION)
        dtype = out_ptr.dtype.element_ty
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        result = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
        place = row[:, None].to(tl.int64) * n + column[None, :]
        tl.store(out_ptr + place, result.to(dtype), mask=inside[:, None] & (column < n)[None, :])


@triton.jit
def expert_down_kernel(
    x_ptr, weight_ptr, starts_ptr, order_ptr, likings_ptr, out_ptr, num_experts, k, n,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns): x · downᵀ, times the assignment's weight. x: in sorted order. weight: [E, n, k].
    out: [assignments, n], in their own order."""
    expert, tile = owner_of(tl.program_id(0), starts_ptr, num_experts, TILE)
    first, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    if first + tile * TILE < end:
        row = first + tile * TILE + tl.arange(0, TILE)
        inside = row < end
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        acc = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
        weights = weight_ptr + expert.to(tl.int64) * n * k + column[None, :].to(tl.int64) * k
        for start in range(0, k, BLOCK_K):
            at = start + depth
            x_place = x_ptr + row[:, None].to(tl.int64) * k + at[None, :]
            x = tl.load(x_place, mask=inside[:, None] & (at < k)[None, :], other=0.0)
            w = tl.load(weights + at[:, None], mask=(at < k)[:, None] & (column < n)[None, :], other=0.0)
            acc += dot(x, w, PRECISION)
        assignment = tl.load(order_ptr + row, mask=inside, other=0)
        liking = tl.load(likings_ptr + assignment, mask=inside, other=0.0)
        dtype = out_ptr.dtype.element_ty
        result = (acc.to(dtype).to(tl.float32) * liking[:, None]).to(dtype)
        place = assignment[:, None] * n + column[None, :]
        tl.store(out_ptr + place, result, mask=inside[:, None] & (column < n)[None, :])


def mixture_of_experts(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, num_experts_per_token: int
) -> torch.Tensor:
    """See Kernels.mixture_of_experts. x: contiguous."""
    num_tokens, hidden = x.shape
    num_experts, inner = gate_up.shape[0], down.shape[2]
    likings, chosen = functional.linear(x, router).float().softmax(-1).topk(num_experts_per_token, dim=-1)
    likings = likings / likings.sum(-1, keepdim=True)
    ranked, order = chosen.flatten().sort(stable=True)
    starts = torch.searchsorted(ranked, torch.arange(num_experts + 1, device=x.device)).int()
    count = num_tokens * num_experts_per_token
    tile = 16 if count <= 16 * num_experts else 64
    num_tiles = count // tile + num_experts
    between = torch.empty(count, inner, dtype=x.dtype, device=x.device)
    out = torch.empty(count, hidden, dtype=x.dtype, device=x.device)
    shape: dict[str, Any] = {"TILE": tile, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    shape["PRECISION"] = precision_of(x.dtype)
    expert_gate_up_kernel[(num_tiles, triton.cdiv(inner, 64))](
        x, gate_up, starts, order, between, num_experts, num_experts_per_token, hidden, inner, **shape
    )
    expert_down_kernel[(num_tiles, triton.cdiv(hidden, 64))](
        between, down, starts, order, likings, out, num_experts, inner, hidden, **shape
    )
    return out.view(num_tokens, num_experts_per_token, hidden).sum(1, dtype=torch.float32).to(x.dtype)
