"""Pure decisions of the decode scheduler: how much room a sequence gets, and how much must be left to the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from common.engine.waiting_queue import rank
from decode_service.sequence import DecodeSequence

# Blocks' worth of tokens that every running sequence must find room for, after a new one was admitted …
ADMIT_HORIZON_BLOCKS: Final = 1
# … and after a preempted one was resumed: more, lest it gives way again at once.
RESUME_HORIZON_BLOCKS: Final = 2


def longest(sequence: DecodeSequence, max_model_len: int) -> int:
    """Positions whose KV it can ever need: the last token that it may produce needs none."""
    return min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, max_model_len) - 1


def tokens_to_reserve(sequence: DecodeSequence, max_model_len: int, horizon_blocks: int) -> int:
    """For how many positions a sequence gets blocks when it is admitted or resumed.

    All its tokens and its horizon, but never more than it can still use: so a sequence that is alone always fits,
    whatever its length. One that was preempted too often gets all that it can use.
    """
    most = longest(sequence, max_model_len)
    wanted = most if sequence.is_guaranteed else sequence.num_tokens + horizon_blocks * sequence.block_size
    return max(sequence.num_tokens, min(wanted, most))


def head_room(sequences: Iterable[DecodeSequence], max_model_len: int, horizon_blocks: int) -> int:
    """Blocks that these will ask for while each produces the tokens of its horizon."""
    return sum(s.block_table.num_missing(tokens_to_reserve(s, max_model_len, horizon_blocks)) for s in sequences)


def resume_rank(sequence: DecodeSequence) -> tuple[bool, bool, int, int]:
    """Of the preempted ones: first who gave way too often, then as all who wait."""
    return (not sequence.is_guaranteed, *rank(sequence))


def run_rank(sequence: DecodeSequence) -> tuple[int, int]:
    """Of the running ones: in this order they get their next blocks."""
    return (sequence.priority, sequence.arrival)
