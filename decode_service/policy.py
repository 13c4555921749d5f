"""Pure decisions of the decode scheduler: how much room a sequence gets, and who gives way when blocks run out."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import TypeVar

from common.engine.sequence import Sequence

S = TypeVar("S", bound=Sequence)


def tokens_with_head_room(sequence: Sequence, max_model_len: int) -> int:
    """For how many positions a sequence gets blocks when it is admitted or resumed.

    All its tokens, and one block more so that it does not ask again at once; but never more than it can still use:
    the last token that it may produce needs no KV. So a sequence that is alone always fits, whatever its length.
    """
    longest = min(sequence.num_prompt_tokens + sequence.sampling.max_tokens, max_model_len) - 1
    return max(sequence.num_tokens, min(sequence.num_tokens + sequence.block_size, longest))


def choose_victim(running: ListOf[S]) -> S:
    """Who is preempted when a block is needed and none is free: the youngest, the one accepted last.

    The same trace gives the same decisions, the oldest always goes on (so something finishes), and what has waited
    longest loses least. `running`: not empty, in order of arrival.
    """
    return running[-1]
