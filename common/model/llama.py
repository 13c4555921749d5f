"""The Llama decoder (arXiv:2302.13971, 2307.09288) over a paged KV cache, written in the operations of Kernels.

One layer:  x ─► norm ─► qkv ─► rope ─► write KV ─► attention ─► o ─► + ─► norm ─► gate_up ─► silu·up ─► down ─► +

Its relatives differ in little: Qwen2 adds a bias to qkv, Qwen3 normalises the heads of q and k before rope, Mixtral
has a mixture of experts in the place of the MLP.

As one rank of a tensor-parallel group (common/model/shard.py) it computes its own heads and its slice of the inner
width: what o and down give are summands, which the group adds up; each rank finds the logits of its own tokens.
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
from common.model.shard import shard_config
from common.model.weights import LayerWeights, LlamaWeights
from common.parallel.communicator import Communicator


class LlamaModel:
    """Implements Model. Owns the weights; the KV cache is the caller's.

    group: of which this is a rank, whose weights and KV cache these are then. All ranks run the same steps; forward's
    logits are rank 0's, the others' are empty.
    """

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, kernels: Kernels[Any], group: Communicator | None = None
    ) -> None:
        self._config = config
        self._group = group
        self._share = config if group is None else shard_config(config, group.shard)
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
        residual = self._embed(batch.token_ids)
        x = torch.zeros_like(residual)
        for layer, pool in zip(weights.layers, kv_cache.layers, strict=True):
            x = kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._summed(self._attention(x, layer, pool, batch.slot_mapping, angles, plan))
            x = kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._summed(self._mlp(x, layer))
        rows = batch.logits_rows
        x = kernels.add_rms_norm(x[rows], residual[rows], weights.norm, eps)
        logits = kernels.linear(x, weights.lm_head).float()
        return logits if self._group is None else self._group.gather_columns(logits, self._config.vocab_size)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden], the caller's to change."""
        embed = self._weights.embed
        if self._group is None:
            return functional.embedding(token_ids, embed)
        own = token_ids - self._group.shard.of(self._config.vocab_size).start
        rows = functional.embedding(own.clamp(0, max(0, len(embed) - 1)), embed)
        elsewhere = (own < 0) | (own >= len(embed))
        return self._group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0.0))

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._group is None else self._group.all_reduce(x)

    def _attention(
        self,
        x: torch.Tensor,
        layer: LayerWeights,
        pool: torch.Tensor,
        slot_mapping: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        plan: Any,
    ) -> torch.Tensor:
        kernels, num_heads, num_kv_heads = self._kernels, self._share.num_heads, self._share.num_kv_heads
        if num_heads == 0:
            return torch.zeros_like(x)
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
