"""Runs one engine step: batch, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.batch import ScheduledSequence, build_batch
from common.engine.sampler import Sampler
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.model.interface import Model
from common.sampling_params import SamplingParams


class ModelRunner:
    """Implements Runner. Borrows model and KV cache; not thread-safe. Raises ValueError if their dtypes differ."""

    def __init__(self, model: Model, kv_cache: KvCache) -> None:
        if TORCH_DTYPES[kv_cache.layout.dtype] != model.dtype:
            raise ValueError(f"model computes in {model.dtype}, the KV cache holds {kv_cache.layout.dtype}")
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = Sampler()

    def execute(self, scheduled: Sequence[ScheduledSequence]) -> list[int | None]:
        """See Runner.execute. Raises BatonError (INTERNAL) if the logits aren't finite."""
        if not scheduled:
            return []
        sampling = [(s.sampling, s.output_index) for s in scheduled if s.sampling is not None]
        with torch.inference_mode():
            batch = build_batch(scheduled, self._kv_cache.layout.block_size, self._kv_cache.device)
            logits = self._model.forward(batch, self._kv_cache)
            tokens = iter(self._sampler.sample(logits, [params for params, _ in sampling], [i for _, i in sampling]))
        return [None if s.sampling is None else next(tokens) for s in scheduled]

    def warm_up(self, num_tokens: int) -> None:
        """Run a chunk of up to `num_tokens` and a decode, so that the first request doesn't pay for lazy set-up.

        Overwrites the first blocks of the KV cache: call it before any of them is in use.
        """
        block_size = self._kv_cache.layout.block_size
        room = min(self._kv_cache.num_blocks * block_size, self._model.config.max_position_embeddings)
        num_tokens = max(1, min(num_tokens, room - 1))
        block_table = range(-(-(num_tokens + 1) // block_size))
        sampling = SamplingParams(max_tokens=1)
        self.execute([ScheduledSequence([0] * num_tokens, 0, block_table[: -(-num_tokens // block_size)], sampling)])
        if room > num_tokens:
            self.execute([ScheduledSequence([0], num_tokens, block_table, sampling)])
