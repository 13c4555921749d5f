"""The Llama decoder (arXiv:2302.13971, 2307.09288) over a paged KV cache, written in the operations of Kernels.

One layer:  x ─► norm ─► qkv ─► rope ─► write KV ─► attention ─► o ─► + ─► norm ─► gate_up ─► silu·up ─► down ─► +

Its relatives differ in little: Qwen2 adds a bias to qkv, Qwen3 normalises the heads of q and k before rope, Mixtral
has a mixture of experts in the place of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from common.engine.batch import Batch
from common.kernels.interface import Kernels
from common.kvcache.kv_cache import KvCache
from common.model.config import ModelConfig
from common.model.rope import cos_sin, inverse_frequencies
from common.model.weights import LayerWeights, LlamaWeights


class LlamaModel:
    """Implements Model. Owns the weights; the KV cache is the caller's."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, kernels: Kernels[Any]) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._inv_freq = inverse_frequencies(config).to(weights.embed.device)
        self._scale = config.head_dim**-0.5

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embed.dtype

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """See Model.forward."""
        kernels, weights, eps = self._kernels, self._weights, self._config.rms_norm_eps
        plan = kernels.plan_attention(batch, kv_cache.layout.block_size, self.dtype)
        angles = cos_sin(self._inv_freq, batch.positions, self.dtype)
        residual = functional.embedding(batch.token_ids, weights.embed)
        x = torch.zeros_like(residual)
        for layer, pool in zip(weights.layers, kv_cache.layers, strict=True):
            x = kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attention(x, layer, pool, batch.slot_mapping, angles, plan)
            x = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._mlp(x, layer)
        rows = batch.logits_rows
        x = kernels.add_rms_norm(x[rows], residual[rows], weights.norm, eps)
        return kernels.linear(x, weights.lm_head).float()

    def _attention(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        pool: torch.Tensor,
        slot_mapping: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        plan: Any,
    ) -> torch.Tensor:
        kernels, num_heads, num_kv_heads = self._kernels, self._config.num_heads, self._config.num_kv_heads
        qkv = kernels.linear(x, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), num_heads + 2 * num_kv_heads, self._config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
            for heads, weight in ((q, layer.q_norm), (k, layer.k_norm)):
                heads.copy_(kernels.rms_norm(heads, weight, self._config.rms_norm_eps))
        kernels.rope_write_kv(qkv, num_heads, angles, pool, slot_mapping)
        return kernels.linear(kernels.attention(qkv[:, :num_heads], pool, plan, self._scale), layer.o)

    def _mlp(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        kernels = self._kernels
        if layer.expert_router is not None:
            each = self._config.num_experts_per_token
            return kernels.mixture_of_experts(x, layer.expert_router, layer.gate_up, layer.down, each)
        return kernels.linear(kernels.silu_mul(kernels.linear(x, layer.gate_up)), layer.down)
