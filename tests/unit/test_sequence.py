"""A sequence's counters, chunks and moves."""

from __future__ import annotations

import pytest

from common.engine.sequence import LEGAL_MOVES, Sequence, SequenceStatus, check_spec
from common.errors import ErrorKind
from common.kvcache.block_hash import chain_hashes
from common.sampling_params import FinishReason
from tests.unit.engine_fakes import SEED, make_spec


def make_sequence(token_ids: list[int], block_size: int = 4, **kwargs: object) -> Sequence:
    return Sequence(make_spec("t", token_ids, **kwargs), 1, 0, 10.0, block_size)  # type: ignore[arg-type]


def test_chunks_cover_every_token_once_and_only_the_last_samples():
    sequence = make_sequence(list(range(10)))
    sequence.block_table.append([5, 6, 7, 8])
    chunks = []
    while sequence.num_uncomputed_tokens:
        chunk = sequence.next_chunk(4)
        chunks.append(chunk)
        sequence.num_computed_tokens += len(chunk.token_ids)
    assert [t for c in chunks for t in c.token_ids] == list(range(10))
    assert [c.start for c in chunks] == [0, 4, 8]
    assert [c.sampling is not None for c in chunks] == [False, False, True]
    assert [list(c.block_table) for c in chunks] == [[5], [5, 6], [5, 6, 7]]


def test_the_sampled_tokens_index_goes_on_after_a_migration():
    sequence = make_sequence([1, 2, 3, 4, 5], num_prompt_tokens=3)
    sequence.block_table.append([0, 1])
    assert sequence.next_chunk(16).output_index == 2


def test_hashes_grow_with_the_tokens_and_equal_the_chain():
    sequence = make_sequence(list(range(6)))
    sequence.extend_hashes()
    for token in range(6, 21):
        sequence.token_ids.append(token)
        sequence.extend_hashes()
    assert sequence.block_hashes == chain_hashes(SEED, sequence.token_ids, 4)


def test_a_sequence_ends_by_stop_token_length_or_context():
    sequence = make_sequence([1, 2, 3], max_tokens=3, stop_token_ids=(9,))
    sequence.token_ids.append(9)
    assert sequence.finish_reason(64) == FinishReason.STOP
    sequence.token_ids[-1] = 8
    assert sequence.finish_reason(64) is None
    assert sequence.finish_reason(4) == FinishReason.LENGTH
    sequence.token_ids += [8, 8]
    assert sequence.finish_reason(64) == FinishReason.LENGTH


def test_only_the_moves_of_the_table_are_legal():
    for start, legal in LEGAL_MOVES.items():
        for target in SequenceStatus:
            sequence = make_sequence([1])
            sequence.status = start
            if target in legal:
                sequence.move_to(target)
                assert sequence.status == target
            else:
                with pytest.raises(RuntimeError, match="illegal move"):
                    sequence.move_to(target)


def test_what_did_not_happen_took_no_time():
    sequence = make_sequence([1])
    timings = sequence.timings(12.5)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (2.5, 0.0, 0.0)
    sequence.started_at, sequence.first_token_at, sequence.decode_started_at = 11.0, 11.5, 12.0
    timings = sequence.timings(12.5)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (1.0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (make_spec("t", []), ErrorKind.INVALID_REQUEST, "num_prompt_tokens is 0"),
        (make_spec("t", [1, 2], num_prompt_tokens=3), ErrorKind.INVALID_REQUEST, "must be 1 to 2"),
        (make_spec("t", [1, 50]), ErrorKind.INVALID_REQUEST, "token id 50 is outside the model's vocabulary of 50"),
        (make_spec("t", [1, 2], num_prompt_tokens=1, max_tokens=1), ErrorKind.INVALID_REQUEST, "nothing is left"),
        (make_spec("t", [1] * 64), ErrorKind.CONTEXT_LENGTH, "maximum context length is 64 tokens"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_with_its_reason(spec, kind, words):
    error = check_spec(spec, vocab_size=50, max_model_len=64)
    assert error is not None
    assert error.kind == kind
    assert words in error.message


def test_a_sequence_that_leaves_room_for_one_token_is_run():
    assert check_spec(make_spec("t", [1] * 63), vocab_size=50, max_model_len=64) is None
