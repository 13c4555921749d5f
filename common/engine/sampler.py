"""From logits to tokens. Every draw is a function of (that row's logits, seed, output index) and of nothing else.

Order of the filters, as in transformers:  temperature ─► top-k ─► top-p ─► min-p ─► draw

    top-k   keeps the k likeliest, and ties of the k-th
    top-p   keeps a token if those likelier than it (ties: lower id first) hold less than top_p of what top-k left
    min-p   keeps a token whose probability is at least min_p times the likeliest's

The draw is Gumbel-max: argmax of log p + Gumbel noise has distribution p (Gumbel 1954; Maddison et al. 2014,
arXiv:1411.0030). Where nothing is filtered, it has two levels, so that only some 500 of the vocabulary's tokens need
noise: first a run of 128 tokens by its mass, then a token within the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch.nn import functional

from common.engine.logits import token_logprobs
from common.engine.random_bits import gumbel_noise, random_key
from common.logprobs import TokenLogprobs
from common.sampling_params import SamplingParams

_RUN: Final = 128  # tokens that share the first level of an unfiltered draw
_RUN_COUNTER: Final = 1 << 32  # the first level's counters lie past all token ids
# top-p sorts no more than it must: tokens within e^-5 of the likeliest's probability if they hold enough, else e^-10, …
_ROUNDING: Final = 1 + 1e-9  # sums in another order may differ by this much
_TOP_P_FLOORS: Final = (-5.0, -8.0, -11.0, -15.0, -math.inf)


class TokenSampler(Protocol):
    """Draws tokens, and says how likely they were. Every implementation draws the same."""

    def sample(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]
    ) -> list[int | None]:
        """One token id a row; None for a row that holds NaN or +inf, or nothing but -inf.

        logits: float32 [R, vocab], not changed. output_indices: i of each row's token.
        """
        ...

    def logprobs(self, row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
        """row: float32 [vocab], finite, as the model made it."""
        ...


class Sampler:
    """Implements TokenSampler in torch, on any device. Stateless."""

    def sample(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]
    ) -> list[int | None]:
        """See TokenSampler.sample."""
        if not params:
            return []
        highest, tokens = logits.max(dim=-1)
        chosen: list[int | None] = tokens.tolist()
        finite = highest.isfinite()
        if not bool(finite.all()):
            chosen = [token if good else None for token, good in zip(chosen, finite.tolist(), strict=True)]
        unfiltered: list[tuple[int, torch.Tensor, int]] = []
        for row, (wanted, index) in enumerate(zip(params, output_indices, strict=True)):
            if wanted.is_greedy or chosen[row] is None:
                continue
            key = random_key(wanted.seed, index)
            # In this order, since a tiny temperature would overflow the plain quotient.
            scaled = (logits[row] - highest[row]) / wanted.temperature
            candidates = _filtered(scaled, wanted)
            if candidates is None:
                unfiltered.append((row, scaled, key))
            else:
                chosen[row] = _draw(scaled, candidates, key)
        if unfiltered:
            rows, scaled_rows, keys = zip(*unfiltered, strict=True)
            for row, token in zip(rows, _draw_unfiltered(scaled_rows, keys), strict=True):
                chosen[row] = token
        return chosen

    def logprobs(self, row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
        """See TokenSampler.logprobs."""
        return token_logprobs(row, token_id, num_top)


def _filtered(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Ids of the tokens that may be drawn, int64, or None for all. scaled: float32 [vocab], its maximum 0."""
    vocab = scaled.numel()
    candidates: torch.Tensor | None = None
    if 0 < params.top_k < vocab:
        candidates = (scaled >= scaled.topk(params.top_k).values[-1]).nonzero().flatten()
    if params.top_p < 1.0:
        candidates = _top_p(scaled, candidates, params.top_p)
    if params.min_p > 0.0:
        floor = math.log(params.min_p)
        if candidates is None:
            candidates = (scaled >= floor).nonzero().flatten()
        else:
            candidates = candidates[scaled[candidates] >= floor]
    return candidates


def _top_p(scaled: torch.Tensor, candidates: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """The likeliest of `candidates` (None: all) whose predecessors hold less than top_p of their mass; at least one."""
    if candidates is not None:
        return _nucleus(scaled, candidates, top_p * _mass(scaled[candidates]))
    wanted = top_p * _mass(scaled)
    for floor in _TOP_P_FLOORS:
        likely = scaled >= floor
        if floor == -math.inf or _mass(scaled[likely]) > wanted * _ROUNDING:
            break
    return _nucleus(scaled, likely.nonzero().flatten(), wanted)


def _nucleus(scaled: torch.Tensor, ids: torch.Tensor, mass: float) -> torch.Tensor:
    """Those of `ids` (ascending) needed to reach `mass` (unnormalised)."""
    values, order = scaled[ids].sort(descending=True, stable=True)
    reached = values.double().exp_().cumsum(0)
    return ids[order[: int((reached[:-1] < mass).sum()) + 1]]


def _mass(scaled: torch.Tensor) -> float:
    return float(scaled.double().exp_().sum())


def _draw(scaled: torch.Tensor, candidates: torch.Tensor, key: int) -> int:
    keys = torch.tensor(key, device=scaled.device)
    return int(candidates[(scaled[candidates].double() + gumbel_noise(keys, candidates)).argmax()])


def _draw_unfiltered(scaled_rows: Sequence[torch.Tensor], row_keys: Sequence[int]) -> list[int]:
    """Two-level Gumbel-max. Row by row over the vocabulary, where rounding may depend on an array's shape; batched
    over the small rest, in float64."""
    device, vocab = scaled_rows[0].device, scaled_rows[0].numel()
    padding = -vocab % _RUN
    runs = [functional.pad(scaled, (0, padding), value=-math.inf).view(-1, _RUN) for scaled in scaled_rows]
    mass = torch.stack([run.exp().sum(dim=-1) for run in runs]).double()
    keys = torch.tensor(row_keys, device=device)[:, None]
    counters = torch.arange(_RUN_COUNTER, _RUN_COUNTER + mass.shape[1], device=device)
    chosen_runs = (mass.log() + gumbel_noise(keys, counters)).argmax(dim=-1).tolist()
    within = torch.stack([run[i] for run, i in zip(runs, chosen_runs, strict=True)]).double()
    first_ids = torch.tensor(chosen_runs, device=device)[:, None] * _RUN
    token_ids = first_ids + torch.arange(_RUN, device=device)
    best = (within + gumbel_noise(keys, token_ids)).argmax(dim=-1, keepdim=True)
    chosen: list[int] = token_ids.gather(1, best).flatten().tolist()
    return chosen
