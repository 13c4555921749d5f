"""The sampler of GPUs: one launch and one copy to the host a step, whatever its rows ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from common.engine.random_bits import random_key
from common.kernels.triton.sampling import logprobs_kernel, sample_kernel
from common.logprobs import TokenLogprobs
from common.sampling_params import SamplingParams

BLOCK_TOKENS: Final = 2048
RUN_TOKENS: Final = 128  # as in the torch sampler


class TritonSampler:
    """Implements TokenSampler. Stateless."""

    def sample(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]
    ) -> list[int | None]:
        """See TokenSampler.sample. logits: the last dimension dense."""
        if not params:
            return []
        rows, vocab = logits.shape
        keys = np.array([random_key(p.seed, i) for p, i in zip(params, output_indices, strict=True)], np.int64)
        temperature = [0.0 if p.is_greedy else p.temperature for p in params]
        least = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        arrays = (
            keys,
            np.array(temperature, np.float32),
            np.array([p.top_k for p in params], np.int32),
            np.array([p.top_p for p in params], np.float64),
            np.array(least, np.float32),
        )
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        sample_kernel[(rows,)](
            logits,
            *(torch.from_numpy(array).to(logits.device) for array in arrays),
            out,
            vocab,
            logits.stride(0),
            BLOCK=BLOCK_TOKENS,
            RUN=RUN_TOKENS,
            num_warps=8,
        )
        return [None if token < 0 else token for token in out.tolist()]

    def logprobs(self, row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
        """See TokenSampler.logprobs."""
        token = torch.tensor([token_id], device=row.device)
        logprob = torch.empty(1, dtype=torch.float32, device=row.device)
        rank = torch.empty(1, dtype=torch.int32, device=row.device)
        logprobs_kernel[(1,)](row, token, logprob, rank, row.numel(), 0, BLOCK=BLOCK_TOKENS, num_warps=8)
        top: tuple[tuple[int, float], ...] = ()
        if num_top:
            values, ids = row.topk(min(num_top, row.numel()))
            values = values - (row[token_id] - logprob)  # the normaliser
            top = tuple(sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0])))
        return TokenLogprobs(token_id, float(logprob), int(rank), top)
