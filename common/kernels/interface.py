"""The operations that models are written in. `reference.py` is the plain torch version that every other is held to;
`triton/` is the set of GPUs. (On CPUs the native executor takes a model whole: `cpu/`.)

T new tokens of a step, H heads, D head_dim. A layer's pool is [num_blocks, 2, num_kv_heads, block_size, D]
(common/kvcache/layout.py). Activations, weights and pool share one dtype; sums run in float32.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from common.engine.batch import Batch

Plan = TypeVar("Plan")


class Kernels(Protocol[Plan]):
    """Stateless. Plan: what this set of kernels wants to know of a step.

    "In place" arguments are overwritten and must not overlap others; all else is left alone.
    """

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] · weight [out, in]ᵀ (+ bias [out]) → [T, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., n] / rms(x) * weight [n] (arXiv:1910.07467); the quotient is rounded to x's dtype first."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place, then rms_norm(residual); all [T, hidden]."""
        ...

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        angles: tuple[torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """qkv [T, num_heads + 2 * num_kv_heads, D]: rotate the heads of q and k in place (arXiv:2104.09864), halves
        split as Hugging Face does: element i pairs with i + D/2. Store k and v at slots [T] of the pool, in place;
        slots are distinct. angles: cos, sin [T, D/2] in qkv's dtype."""
        ...

    def plan_attention(self, batch: Batch, block_size: int, dtype: torch.dtype) -> Plan:
        """What `attention` needs of a step, computed once for all layers. dtype: of the queries."""
        ...

    def attention(self, q: torch.Tensor, pool: torch.Tensor, plan: Plan, scale: float) -> torch.Tensor:
        """Causal grouped-query attention of q [T, num_heads, D] over each sequence's blocks → [T, num_heads * D].
        Query head h reads key-value head h // (num_heads / num_kv_heads)."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * n] → silu(first half) * second half, [T, n] (arXiv:2002.05202)."""
        ...

    def mixture_of_experts(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_experts_per_token: int,
    ) -> torch.Tensor:
        """Each row of x [T, hidden] through the num_experts_per_token experts that router [E, hidden] likes best, as
        gated MLPs: gate_up [E, 2 * n, hidden], down [E, hidden, n]; summed by the likings, which are renormalised to
        sum to 1 (arXiv:2401.04088) → [T, hidden]."""
        ...
