"""The operations on a GPU: products by torch's own libraries, all between them in Triton."""

from __future__ import annotations

import torch
from torch.nn import functional

from common.engine.batch import Batch
from common.kernels.triton import attention, experts, pointwise
from common.kernels.triton.attention import StepPlan


class TritonKernels:
    """Implements Kernels[StepPlan]. No operation waits for the device, or depends on what tensors hold: a step can be
    captured in a CUDA graph. Padding is allowed: sequences of length 0 and slots of -1."""

    def plan_attention(self, batch: Batch, block_size: int, dtype: torch.dtype) -> StepPlan:
        only_decodes = batch.token_ids.numel() == batch.num_sequences
        return StepPlan(batch.query_start, batch.seq_lens, batch.block_tables, only_decodes)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return pointwise.rms_norm(x, weight, eps, residual)

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        angles: tuple[torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        pointwise.rope_write_kv(qkv, num_heads, *angles, pool, slot_mapping)

    def attention(self, q: torch.Tensor, pool: torch.Tensor, plan: StepPlan, scale: float) -> torch.Tensor:
        return attention.attention(q, pool, plan, scale)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return pointwise.silu_mul(gate_up)

    def mixture_of_experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_experts_per_token: int,
    ) -> torch.Tensor:
        return experts.mixture_of_experts(x, router, gate_up, down, num_experts_per_token)
