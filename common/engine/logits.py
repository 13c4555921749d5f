"""What a request asks to be changed in its logits, and what it is told of them: row by row, of the request alone.

    raw logits ─► logprobs
        └──► logit_bias ─► min_tokens ─► repetition ─► frequency, presence ─► sampler (temperature, top-k, …)

The order is vLLM's. All of it is derived from prompt and output, so that a sequence which was preempted or has migrated
goes on as it would have. Repetition: Keskar et al. 2019, arXiv:1909.05858, over prompt and output, as in transformers;
frequency and presence: OpenAI's, over the output alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from common.logprobs import TokenLogprobs
from common.sampling_params import SamplingParams


def adjusted(
    row: torch.Tensor, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int, output_index: int
) -> torch.Tensor | None:
    """A changed copy of `row`, or None where `params` change nothing. row: float32 [vocab].

    token_ids: prompt and output so far. output_index: of the token to be drawn.
    """
    if not params.changes_logits:
        return None
    row = row.clone()
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        row[list(ids)] += torch.tensor(values, dtype=row.dtype, device=row.device)
    if output_index < params.min_tokens and params.stop_token_ids:
        row[list(params.stop_token_ids)] = -math.inf
    if not params.has_penalties:
        return row
    tokens = np.array(token_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(tokens).to(row.device)  # repeated ones are written repeatedly, with the same value
        values_seen, penalty = row[seen], params.repetition_penalty
        row[seen] = torch.where(values_seen > 0, values_seen / penalty, values_seen * penalty)
    if (params.frequency_penalty or params.presence_penalty) and len(tokens) > num_prompt_tokens:
        said, counts = map(torch.from_numpy, np.unique(tokens[num_prompt_tokens:], return_counts=True))
        row[said.to(row.device)] -= params.frequency_penalty * counts.to(row) + params.presence_penalty
    return row


def token_logprobs(row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """row: float32 [vocab], finite, as the model made it."""
    normalizer = row.logsumexp(0)
    value = row[token_id]
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = row.topk(min(num_top, row.numel()))
        found = zip(ids.tolist(), (values - normalizer).tolist(), strict=True)
        top = tuple(sorted(found, key=lambda pair: (-pair[1], pair[0])))
    return TokenLogprobs(token_id, float(value - normalizer), int((row > value).sum()) + 1, top)
