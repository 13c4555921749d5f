"""Sampling for a step in which some sequence asks for more than a token: penalties, logprobs, forks, prompt logprobs.

    logits [R, vocab]   | s0 | s1 s1 s1 | s2 |        s1: a chunk whose prompt logprobs are wanted
    draws                 s0         s1   s2 s2 s2    s2: three continuations of one context, a seed each

All draws of the step are made in one call of the sampler, changed rows and plain ones together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from common.engine.batch import ScheduledSequence
from common.engine.logits import adjusted
from common.engine.runner import SampledExtras, StepResult
from common.engine.sampler import TokenSampler
from common.errors import BatonError, ErrorKind
from common.logprobs import TokenLogprobs
from common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _Draw:
    """row: of the logits. changed: what the token is drawn from instead, None where it is the row itself."""

    row: int
    params: SamplingParams
    output_index: int
    changed: torch.Tensor | None


def sample_with_extras(
    sampler: TokenSampler, scheduled: Sequence[ScheduledSequence], logits: torch.Tensor
) -> StepResult:
    """logits: float32 [R, vocab], of the sequences in order, ScheduledSequence.num_logits_rows each; not changed."""
    first_rows: list[int] = []
    draws: list[list[_Draw]] = []
    row = 0
    for s in scheduled:
        first_rows.append(row)
        row += s.num_logits_rows
        draws.append(_draws_of(s, row - 1, logits))
    tokens = iter(_sample(sampler, [d for group in draws for d in group], logits))
    token_ids: list[int | None] = []
    extras: dict[int, SampledExtras] = {}
    for index, (s, first, group) in enumerate(zip(scheduled, first_rows, draws, strict=True)):
        drawn = [next(tokens) for _ in group]
        found = _extras_of(sampler, s, logits[first : first + s.num_logits_rows], group, drawn)
        token_ids.append(drawn[0] if drawn and found.error is None else None)
        if s.extras is not None or found.error is not None:
            extras[index] = found
    return StepResult(token_ids, extras)


def not_finite() -> BatonError:
    return BatonError(ErrorKind.INTERNAL, "the model's logits are not finite: its weights or KV are damaged")


def _draws_of(s: ScheduledSequence, row: int, logits: torch.Tensor) -> list[_Draw]:
    if s.sampling is None:
        return []
    if s.extras is None:
        return [_Draw(row, s.sampling, s.output_index, None)]
    changed = adjusted(logits[row], s.sampling, s.extras.token_ids, s.extras.num_prompt_tokens, s.output_index)
    params = [s.sampling, *(replace(s.sampling, seed=seed) for seed in s.extras.fork_seeds)]
    return [_Draw(row, each, s.output_index, changed) for each in params]


def _sample(sampler: TokenSampler, draws: Sequence[_Draw], logits: torch.Tensor) -> list[int | None]:
    params, indices = [d.params for d in draws], [d.output_index for d in draws]
    rows = [d.row for d in draws]
    if rows != list(range(len(logits))) or any(d.changed is not None for d in draws):
        logits = logits[rows]
        for row, draw in zip(logits, draws, strict=True):
            if draw.changed is not None:
                row.copy_(draw.changed)
    return sampler.sample(logits, params, indices)


def _extras_of(
    sampler: TokenSampler, s: ScheduledSequence, rows: torch.Tensor, draws: Sequence[_Draw], drawn: Sequence[int | None]
) -> SampledExtras:
    """rows: the sequence's own, raw."""
    tokens = [token for token in drawn if token is not None]
    targets = () if s.extras is None else s.extras.prompt_targets
    if len(tokens) < len(drawn) or (targets and not bool(rows.isfinite().all())):
        return SampledExtras(error=not_finite())
    if s.extras is None:
        return SampledExtras()
    told = [_logprobs(sampler, rows[-1], token, draw.params) for token, draw in zip(tokens, draws, strict=True)]
    # The last row of the prompt's last chunk has no target.
    prompt = [sampler.logprobs(row, t, s.extras.num_prompt_logprobs) for row, t in zip(rows, targets, strict=False)]
    return SampledExtras(
        logprobs=told[0] if told else None,
        forks=tuple(zip(tokens[1:], told[1:], strict=True)),
        prompt_logprobs=tuple(prompt),
    )


def _logprobs(sampler: TokenSampler, row: torch.Tensor, token_id: int, params: SamplingParams) -> TokenLogprobs | None:
    return None if params.logprobs is None else sampler.logprobs(row, token_id, params.logprobs)
