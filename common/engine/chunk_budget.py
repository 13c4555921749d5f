"""How many tokens a step's chunks may compute so that the step ends within its target: a controller without a clock.

    budget = (target_s - decode_s) / token_s          floor ≤ budget ≤ ceiling

    decode_s   what a step costs beside its chunks      moving mean over steps without chunks, at most half the target
    token_s    what one token of a chunk adds           moving mean over steps whose chunks used half the budget

The same measurements give the same budgets. It comes to rest: a budget within 1/8 of the wanted one stays, and grows at
most twofold a step. docs/SCHEDULING.md shows why it does not swing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

_WEIGHT: Final = 1 / 8  # of a new measurement
_OUTLIER: Final = 4.0  # a measurement counts as at most this many times the mean, and at least its inverse
_DEAD_BAND: Final = 8  # changes below 1/8 are noise


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """ceiling_tokens: the budget where target_s is 0, and the bound of any. floor_tokens: prompts always get on."""

    ceiling_tokens: int
    target_s: float = 0.0
    floor_tokens: int = 32


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """tokens: what the chunks of the next step may compute. Seconds are 0 where nothing was measured yet."""

    tokens: int
    decode_s: float = 0.0
    token_s: float = 0.0


def first_budget(limits: BudgetLimits, token_s: float = 0.0) -> ChunkBudget:
    """From what is known before the first step: nothing, or a token's cost as measured at the start."""
    return _adapted(ChunkBudget(limits.ceiling_tokens, token_s=token_s), limits, most=limits.ceiling_tokens)


def next_budget(
    budget: ChunkBudget, limits: BudgetLimits, num_chunk_tokens: int, num_decodes: int, step_s: float
) -> ChunkBudget:
    """After a step of so many chunk tokens and decodes that took step_s seconds."""
    if not limits.target_s or step_s <= 0:
        return budget
    if not num_chunk_tokens:
        return _adapted(replace(budget, decode_s=_mean(budget.decode_s, step_s)), limits, most=2 * budget.tokens)
    if num_decodes and step_s < budget.decode_s:
        # Decodes alone were thought to take longer than this step with chunks.
        budget = replace(budget, decode_s=step_s)
    if num_chunk_tokens * 2 >= budget.tokens or step_s > limits.target_s:
        decode_s = _counted_decode_s(budget, limits) if num_decodes else 0.0
        budget = replace(budget, token_s=_mean(budget.token_s, (step_s - decode_s) / num_chunk_tokens))
    return _adapted(budget, limits, most=2 * budget.tokens)


def _counted_decode_s(budget: ChunkBudget, limits: BudgetLimits) -> float:
    """Counting more than half the target would let an error in it swing the budget; see docs/SCHEDULING.md."""
    return min(budget.decode_s, limits.target_s / 2)


def _mean(mean: float, value: float) -> float:
    if not mean:
        return max(value, 0.0)
    return mean + _WEIGHT * (min(max(value, mean / _OUTLIER), mean * _OUTLIER) - mean)


def _adapted(budget: ChunkBudget, limits: BudgetLimits, *, most: int) -> ChunkBudget:
    if not limits.target_s or not budget.token_s:
        return budget
    floor = min(limits.floor_tokens, limits.ceiling_tokens)
    room = int((limits.target_s - _counted_decode_s(budget, limits)) / budget.token_s)
    wanted = max(floor, min(room, limits.ceiling_tokens, most))
    if abs(wanted - budget.tokens) * _DEAD_BAND <= budget.tokens and budget.tokens <= limits.ceiling_tokens:
        return budget
    return replace(budget, tokens=wanted)
