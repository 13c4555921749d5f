"""Runs one engine step: copies of shared blocks, batch, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.device import sampler_for
from common.engine.batch import Batch, ScheduledSequence, build_batch
from common.engine.extras import not_finite, sample_with_extras
from common.engine.runner import SampledExtras, StepResult
from common.kvcache.interface import KvPool
from common.kvcache.kv_cache import TORCH_DTYPES
from common.model.interface import GreedyModel, Model
from common.sampling_params import SamplingParams


class ModelRunner:
    """Implements Runner. Borrows model and KV cache; not thread-safe. Raises ValueError if their dtypes differ."""

    def __init__(self, model: Model, kv_cache: KvPool) -> None:
        if TORCH_DTYPES[kv_cache.layout.dtype] != model.dtype:
            raise ValueError(f"model computes in {model.dtype}, the KV cache holds {kv_cache.layout.dtype}")
        self._model = model
        self._kv_cache = kv_cache
        self._sampler = sampler_for(kv_cache.device)
        self._greedy_model = model if isinstance(model, GreedyModel) else None

    def execute(self, scheduled: Sequence[ScheduledSequence]) -> StepResult:
        """See Runner.execute. A row of logits that isn't finite fails its own sequence only."""
        if not scheduled:
            return StepResult([])
        with torch.inference_mode():
            if copies := [s.copy for s in scheduled if s.copy is not None]:
                self._kv_cache.copy_blocks(copies)
            batch = build_batch(scheduled, self._kv_cache.layout.block_size, self._kv_cache.device)
            if any(s.extras is not None for s in scheduled):
                return sample_with_extras(self._sampler, scheduled, self._model.forward(batch, self._kv_cache.own))
            drawn = self._draw(batch, scheduled)
        tokens = iter(drawn)
        token_ids = [None if s.sampling is None else next(tokens) for s in scheduled]
        if None not in drawn:
            return StepResult(token_ids)
        failed = (i for i, s in enumerate(scheduled) if s.sampling is not None and token_ids[i] is None)
        return StepResult(token_ids, {i: SampledExtras(error=not_finite()) for i in failed})

    def _draw(self, batch: Batch, scheduled: Sequence[ScheduledSequence]) -> list[int | None]:
        """One token a row of batch.logits_rows, from the model's own logits; None where the row isn't finite."""
        sampling = [(s.sampling, s.output_index) for s in scheduled if s.sampling is not None]
        if self._greedy_model is not None and all(params.is_greedy for params, _ in sampling):
            best: list[int] = self._greedy_model.forward_greedy(batch, self._kv_cache.own)[1].tolist()
            return [None if token == -1 else token for token in best]
        logits = self._model.forward(batch, self._kv_cache.own)
        return self._sampler.sample(logits, [params for params, _ in sampling], [i for _, i in sampling])

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
