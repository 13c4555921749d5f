"""Tokens of two legs become one output, in order, each once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.token_merger import TokenMerger


def test_decode_may_be_ahead_of_the_first_token():
    merger = TokenMerger(max_tokens=10)
    assert merger.add(1, [11, 12]) is False
    assert merger.add(3, [13]) is False
    assert merger.token_ids == []
    assert merger.add(0, [10]) is True
    assert merger.token_ids == [10, 11, 12, 13]


def test_what_is_known_is_dropped():
    merger = TokenMerger(10)
    merger.add(0, [1, 2, 3])
    assert merger.add(0, [1, 2]) is False
    assert merger.add(1, [2, 3, 4]) is True
    assert merger.token_ids == [1, 2, 3, 4]


def test_the_output_never_exceeds_max_tokens():
    merger = TokenMerger(3)
    assert merger.add(0, [1, 2, 3, 4, 5]) is True
    assert merger.add(3, [4]) is False
    assert merger.add(7, [8]) is False
    assert merger.token_ids == [1, 2, 3]


def test_a_restart_forgets_what_lay_behind_a_gap():
    merger = TokenMerger(10)
    merger.add(0, [1])
    merger.add(5, [6])
    merger.restart()
    merger.add(1, [2, 3, 4, 5])
    assert merger.token_ids == [1, 2, 3, 4, 5]


@given(st.data())
def test_any_order_overlap_and_repetition_gives_the_one_output(data):
    total = data.draw(st.integers(1, 30))
    output = [100 + i for i in range(total)]
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6))})
    pieces = [(a, output[a:b]) for a, b in pairwise(cuts)]
    extra = data.draw(st.lists(st.tuples(st.integers(0, total), st.integers(0, total)), max_size=6))
    pieces += [(min(a, b), output[min(a, b) : max(a, b)]) for a, b in extra]
    merger = TokenMerger(total)
    grown = []
    for first_index, tokens in data.draw(st.permutations(pieces)):
        before = len(merger.token_ids)
        assert merger.add(first_index, tokens) == (len(merger.token_ids) > before)
        grown.append(len(merger.token_ids))
        assert merger.token_ids == output[: len(merger.token_ids)]
    assert grown == sorted(grown)
    assert merger.token_ids == output
