"""The operations in plain torch: correct on any device and dtype, and the yardstick of every faster version.

Attention gathers a sequence's blocks with one index_select, straight into the shape that scaled_dot_product_attention
wants; grouped heads share them without a copy. (An index_select over a transposed view would copy the whole pool.)

    pool [N, 2, H, block, D]  as rows [N * 2 * H, block * D]  ──index_select──►  [2, H, n * block, D]
"""

from __future__ import annotations

import torch
from torch.nn import functional

from common.engine.batch import Batch
from common.kernels.attention_plan import TILE_ROWS, AttentionPlan, Chunk, DecodeGroup, plan_attention


class ReferenceKernels:
    """Implements Kernels[AttentionPlan]."""

    def plan_attention(self, batch: Batch, block_size: int, dtype: torch.dtype) -> AttentionPlan:
        return plan_attention(batch, block_size, dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * (wide * scale).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        angles: tuple[torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_kv_heads = pool.shape[2]
        self.rope(qkv[:, : num_heads + num_kv_heads], *angles)
        _, k, v = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        self.write_kv(k, v, pool, slot_mapping)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """x [T, H, D], in place; cos, sin [T, D/2]."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        rotated = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(rotated)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """k, v [T, num_kv_heads, D] to slots [T] of the pool."""
        block_size = pool.shape[3]
        where = (slot_mapping // block_size, slot_mapping % block_size)
        for kind, new in enumerate((k, v)):
            pool[:, kind].transpose(1, 2).index_put_(where, new)

    def attention(self, q: torch.Tensor, pool: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = pool.shape[2]
        grouped = q.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = torch.empty_like(grouped, memory_format=torch.contiguous_format)
        for chunk in plan.chunks:
            _attend_chunk(grouped, pool, chunk, plan.tile_mask, scale, out)
        for group in plan.groups:
            _attend_group(grouped, pool, group, scale, out)
        return out.view(num_tokens, num_heads * head_dim)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def mixture_of_experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_experts_per_token: int,
    ) -> torch.Tensor:
        likings = functional.linear(x, router).float().softmax(-1)
        weights, chosen = likings.topk(num_experts_per_token, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, choices = (chosen == expert).nonzero(as_tuple=True)
            result = functional.linear(self.silu_mul(functional.linear(x[rows], gate_up[expert])), down[expert])
            out.index_add_(0, rows, (result * weights[rows, choices, None]).to(x.dtype))
        return out


def _attend_chunk(
    q: torch.Tensor, pool: torch.Tensor, chunk: Chunk, mask: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """q, out: [T, H, G, D]; writes the chunk's rows of `out`."""
    k, v = _gathered(pool, chunk.block_ids)
    groups, prefix = q.shape[2], mask.shape[1] - mask.shape[0]
    k, v = (x[:, None].expand(-1, groups, -1, -1) for x in (k, v))
    for first in range(chunk.first_row, chunk.end_row, TILE_ROWS):
        end = min(first + TILE_ROWS, chunk.end_row)
        seen = chunk.start + first - chunk.first_row  # tokens before the tile
        visible = seen + end - first
        result = functional.scaled_dot_product_attention(
            q[first:end].permute(1, 2, 0, 3),
            k[:, :, :visible],
            v[:, :, :visible],
            attn_mask=mask[: end - first, prefix - seen : prefix + end - first],
            scale=scale,
        )
        out[first:end] = result.permute(2, 0, 1, 3)


def _attend_group(q: torch.Tensor, pool: torch.Tensor, group: DecodeGroup, scale: float, out: torch.Tensor) -> None:
    """q, out: [T, H, G, D]; writes the group's rows of `out`. A head's G queries take the place of query positions."""
    n, padded = group.mask.shape
    k, v = (x.view(x.shape[0], n, padded, x.shape[2]) for x in _gathered(pool, group.block_ids))
    for x in (k, v):  # a weight of zero doesn't hide another sequence's infinity
        x[:, :, group.shortest :].masked_fill_(group.absent[:, :, None], 0.0)
    result = functional.scaled_dot_product_attention(
        q[group.rows].transpose(0, 1), k, v, attn_mask=group.mask[None, :, None], scale=scale
    )
    out[group.rows] = result.transpose(0, 1)


def _gathered(pool: torch.Tensor, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the blocks, each [H, len(block_ids) * block_size, D] and contiguous."""
    num_kv_heads, head_dim = pool.shape[2], pool.shape[4]
    rows_of_block = torch.arange(2 * num_kv_heads, device=pool.device)
    rows = rows_of_block[:, None] + block_ids * (2 * num_kv_heads)
    blocks = pool.flatten(0, 2).flatten(1).index_select(0, rows.flatten())
    k, v = blocks.view(2, num_kv_heads, -1, head_dim)
    return k, v
