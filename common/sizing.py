"""Bytes that models take: weights, KV, and KV on the way from prefill to decode. Pure; docs/SIZING.md is made of it.

Time on the way is TransferCost's (common/transfer_cost.py), by which placement and pulls decide, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.transfer_cost import TransferCost

# Of a GPU's memory, what weights and KV may take; the rest is activations, graphs and the runtime.
USABLE_RATIO: Final = 0.9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_experts: 1 is a dense MLP. mlp_matrices: 3 is gated (gate, up, down), 2 is not. num_positions: learned
    position embeddings. Biases and norms of a hundred thousandth of the weights are left out."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 1
    num_experts_per_token: int = 1
    mlp_matrices: int = 3
    is_tied: bool = False
    num_positions: int = 0

    def num_weights(self, *, active: bool = False) -> int:
        """All of them, or those that one token is multiplied by (all but the other experts' and the embedding's)."""
        experts = self.num_experts_per_token if active else self.num_experts
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = experts * self.mlp_matrices * self.hidden_size * self.intermediate_size
        router = self.num_experts * self.hidden_size if self.num_experts > 1 else 0
        tables = 1 if active or self.is_tied else 2
        embeddings = (tables * self.vocab_size + (0 if active else self.num_positions)) * self.hidden_size
        return self.num_layers * (attention + mlp + router) + embeddings

    def kv_token_bytes(self, value_bytes: int) -> int:
        """Of one token's keys and values over all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * value_bytes


def num_gpu_blocks(
    shape: ModelShape, *, memory_bytes: float, tensor_parallel: int, block_size: int, value_bytes: int
) -> int:
    """KV blocks for which each GPU of a group has room for its part, beside its part of the weights; 0: for none.
    KV heads are replicated where they are fewer than GPUs."""
    weights = shape.num_weights() * value_bytes / tensor_parallel
    heads = max(1.0, shape.num_kv_heads / tensor_parallel)
    block = shape.kv_token_bytes(value_bytes) / shape.num_kv_heads * heads * block_size
    return max(0, int((USABLE_RATIO * memory_bytes - weights) // block))


def transfer_s(num_tokens: int, token_bytes: int, gigabits_per_s: float) -> float:
    """Of so many tokens' KV at line rate, without latency."""
    return TransferCost(latency_s=0.0, bytes_per_s=gigabits_per_s * 1e9 / 8).seconds(num_tokens * token_bytes)


def prefill_s(shape: ModelShape, num_tokens: int, flops_per_s: float) -> float:
    """At so many FLOP/s in all, attention over the context left out: two FLOPs a weight and token."""
    return 2 * shape.num_weights(active=True) * num_tokens / flops_per_s
