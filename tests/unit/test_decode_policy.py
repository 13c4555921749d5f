"""Room for a sequence, and who gives way: pure, and never a dead end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.sequence import Sequence
from common.kvcache.block_table import num_blocks_for_tokens
from decode_service.policy import choose_victim, tokens_with_head_room
from tests.unit.engine_fakes import make_spec

BLOCK_SIZE = 4


def make_sequence(num_tokens: int, num_prompt_tokens: int, max_tokens: int, arrival: int = 0) -> Sequence:
    spec = make_spec("t", [1] * num_tokens, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
    return Sequence(spec, 1, arrival, 0.0, BLOCK_SIZE)


@settings(deadline=None)
@given(st.integers(1, 63), st.integers(1, 100), st.data())
def test_a_sequence_gets_what_it_has_and_no_more_than_it_can_use(num_tokens, max_tokens, data):
    num_prompt_tokens = data.draw(st.integers(max(1, num_tokens - max_tokens + 1), num_tokens))
    sequence = make_sequence(num_tokens, num_prompt_tokens, max_tokens)
    room = tokens_with_head_room(sequence, max_model_len=64)
    assert num_tokens <= room <= num_tokens + BLOCK_SIZE
    assert num_blocks_for_tokens(room, BLOCK_SIZE) <= 64 // BLOCK_SIZE  # alone, it fits a pool of one context
    last_position = min(num_prompt_tokens + max_tokens, 64) - 1  # the last token's own KV is never needed
    assert room <= max(num_tokens, last_position)


def test_the_youngest_gives_way():
    running = [make_sequence(5, 5, 5, arrival) for arrival in (1, 4, 9)]
    assert choose_victim(running).arrival == 9
