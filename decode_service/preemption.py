"""Who gives its blocks up when none is free, and how its KV comes back: pure, in whole nanoseconds, explained in
docs/SCHEDULING.md.

    loss    the cheapest way to have the victim's KV again: recompute it, or swap it through host memory
    gain    blocks that come free
    victim  of the least urgent class, and of those within a factor of two of its least loss a block, the youngest
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final

from common.engine.cost_rates import CostRates

# A sequence that gave way so often gets, with its next blocks, all that it can ever need: it asks and gives no more.
MAX_PREEMPTIONS: Final = 3
# Rates are powers of two: what differs by less is the same.
EQUAL_WITHIN: Final = 2
# What going on elsewhere takes beside computing and sending: frames between router and workers, a place in a batch.
MOVE_STEPS: Final = 4


class Means(StrEnum):
    """How a preempted sequence gets its KV back. What its blocks left in the pool's cache is used in either case."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one running sequence would lose and give.

    num_tokens: with KV. num_kept_tokens: leading ones whose blocks others hold, too: they stay. num_saved_tokens:
    leading ones that host memory would keep. num_freed_blocks: held by nobody else. num_saves: of its full blocks,
    those that host memory lacks. num_loads: blocks between kept and saved. can_swap: host memory has room for all.
    """

    priority: int
    arrival: int
    num_tokens: int
    num_kept_tokens: int
    num_saved_tokens: int
    num_freed_blocks: int
    num_saves: int
    num_loads: int
    can_swap: bool

    def loss(self, rates: CostRates) -> tuple[int, Means]:
        """Nanoseconds of the cheaper means; of equals, the one that needs no memory."""
        recompute_ns = rates.compute_ns(self.num_kept_tokens, self.num_tokens)
        if self.can_swap:
            rest_ns = rates.compute_ns(max(self.num_saved_tokens, self.num_kept_tokens), self.num_tokens)
            swap_ns = (self.num_saves + self.num_loads) * rates.block_copy_ns + rest_ns
            if swap_ns < recompute_ns:
                return swap_ns, Means.SWAP
        return recompute_ns, Means.RECOMPUTE


# Index of the victim, and the means. candidates: not empty.
VictimPolicy = Callable[[Sequence[Candidate], CostRates], tuple[int, Means]]


def choose_victim(candidates: Sequence[Candidate], rates: CostRates) -> tuple[int, Means]:
    """The victim that wastes least; see VictimPolicy. One that frees nothing is the last resort."""
    worst = max(candidate.priority for candidate in candidates)
    losses = {i: candidate.loss(rates) for i, candidate in enumerate(candidates) if candidate.priority == worst}

    def loss_per_block(index: int) -> float:
        num_freed = candidates[index].num_freed_blocks
        return losses[index][0] / num_freed if num_freed else inf

    least = min(map(loss_per_block, losses))
    equal = [index for index in losses if loss_per_block(index) <= EQUAL_WITHIN * least]
    chosen = max(equal, key=lambda index: candidates[index].arrival)
    return chosen, losses[chosen][1]


def youngest(candidates: Sequence[Candidate], rates: CostRates) -> tuple[int, Means]:
    """What most engines do: the newest gives way, and is recomputed. The yardstick of choose_victim."""
    return max(range(len(candidates)), key=lambda i: candidates[i].arrival), Means.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Holder:
    """A running sequence: blocks that its end would free, and how many tokens it may still produce at most."""

    num_blocks: int
    num_left_tokens: int


def steps_until_free(num_needed: int, num_free: int, holders: Sequence[Holder], block_size: int) -> int:
    """Decode steps until num_needed blocks are free, if all run to their last token; those that stay grow meanwhile."""
    if num_free >= num_needed or not holders:
        return 0
    by_end = sorted(holders, key=lambda holder: holder.num_left_tokens)
    for num_staying, holder in zip(range(len(by_end) - 1, -1, -1), by_end, strict=True):
        num_free += holder.num_blocks
        if num_free - num_staying * holder.num_left_tokens // block_size >= num_needed:
            return holder.num_left_tokens
    return by_end[-1].num_left_tokens


def is_worth_moving(num_tokens: int, stay_steps: int, loss_ns: int, num_blocks: int, rates: CostRates) -> bool:
    """Whether going on elsewhere, from its tokens, is cheaper than to wait stay_steps and lose loss_ns here."""
    stay_ns = stay_steps * rates.step_ns + loss_ns
    move_ns = rates.compute_ns(0, num_tokens) + 2 * num_blocks * rates.block_copy_ns + MOVE_STEPS * rates.step_ns
    return move_ns < stay_ns
