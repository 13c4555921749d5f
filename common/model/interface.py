"""What the engine needs of a model: one call a step. The reference and the native executor both stand behind it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from common.engine.batch import Batch
from common.kvcache.kv_cache import KvCache
from common.model.config import ModelConfig


class Model(Protocol):
    """Weights on one device, and their forward pass. Not thread-safe: one step at a time."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and the KV cache: float32 or bfloat16."""
        ...

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """Compute the step: write the new tokens' KV into `kv_cache` at batch.slot_mapping, attend over each
        sequence's block table, and return float32 logits [R, vocab_size] of batch.logits_rows (R may be 0).

        Every slot that is read was written before, by this or an earlier step. A result's row depends only on its own
        sequence. Called under torch.inference_mode. The returned tensor may be reused by the next call.
        """
        ...


@runtime_checkable
class GreedyModel(Model, Protocol):
    """A model that finds the largest logits on its own threads, while they are in its caches."""

    def forward_greedy(self, batch: Batch, kv_cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        """forward, and each row's token: the index of the largest logit (the first of equals), int64 [R]; -1 where a
        logit of the row is not finite."""
        ...
