"""Workloads are deterministic, have the lengths they promise, and share exactly what they say they share."""

import itertools
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.errors import BenchError
from loadtest.prompts import PromptMaker, words_of
from loadtest.record import RequestRecord
from loadtest.tokens import TokenSource
from loadtest.workloads.registry import WORKLOADS, describe_workload, parse_workload, workload_help


def sessions(spec, count, seed=0):
    workload = parse_workload(spec)
    return list(itertools.islice(workload.sessions(TokenSource(seed), random.Random(seed)), count))


def prompts(spec, count, seed=0):
    return [s.turns[0].token_ids for s in sessions(spec, count, seed)]


def common_prefix(a, b):
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


@given(st.integers(0, 2**63), st.integers(0, 300), st.integers(0, 300))
def test_a_longer_span_starts_with_the_shorter(key, one, other):
    source = TokenSource(3, low=100, high=32_000)
    short, long = sorted((one, other))
    assert np.array_equal(source.span(key, long)[:short], source.span(key, short))
    assert all(100 <= t < 32_000 for t in source.span(key, long).tolist())


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6), st.integers(1, 600), st.integers(0, 9))
def test_equal_block_ids_give_equal_blocks_wherever_they_stand(ids, block, seed):
    source = TokenSource(seed)
    whole = source.blocks(ids, block, len(ids) * block)
    for place, one in enumerate(ids):
        assert np.array_equal(whole[place * block : (place + 1) * block], source.blocks([one], block, block))


def test_tokens_spread_over_the_whole_range_and_differ_by_key_and_seed():
    source = TokenSource(0, low=100, high=32_000)
    tokens = source.span(source.key("a"), 100_000)
    assert abs(tokens.mean() - 16_050) < 200
    assert len(np.unique(tokens)) > 30_000
    assert common_prefix(tokens, source.span(source.key("b"), 100)) < 3
    assert common_prefix(tokens, TokenSource(1).span(TokenSource(1).key("a"), 100)) < 3
    assert common_prefix(tokens, source.child("x").span(source.child("x").key("a"), 100)) < 3


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(BenchError, match="--vocab-size"):
        TokenSource(0, low=100, high=100)


@pytest.mark.parametrize(
    "spec", ["fixed", "sharegpt", "mixed:max=2000", "shared-prefix:groups=3", "rag:document=99", "chat"]
)
def test_the_same_seed_gives_the_same_sessions(spec):
    def flat(made):
        return [(t.token_ids.tolist(), t.max_tokens, t.think_s) for s in made for t in s.turns]

    assert flat(sessions(spec, 20)) == flat(sessions(spec, 20))
    assert flat(sessions(spec, 20)) != flat(sessions(spec, 20, seed=1))


def test_fixed_lengths_are_fixed_and_prompts_are_new():
    made = prompts("fixed:input=77,output=5", 50)
    assert {len(p) for p in made} == {77}
    assert max(common_prefix(a, b) for a, b in itertools.combinations(made, 2)) < 4


def test_sharegpt_has_the_published_means_and_keeps_its_caps():
    made = sessions("sharegpt:max_input=100000,max_output=100000", 4000)
    assert statistics.mean(len(s.turns[0].token_ids) for s in made) == pytest.approx(161, rel=0.12)
    assert statistics.mean(s.turns[0].max_tokens for s in made) == pytest.approx(338, rel=0.08)
    capped = sessions("sharegpt:max_input=64,max_output=32", 500)
    assert max(len(s.turns[0].token_ids) for s in capped) == 64
    assert max(s.turns[0].max_tokens for s in capped) == 32
    assert min(len(s.turns[0].token_ids) for s in capped) >= 4


def test_mixed_lengths_are_even_on_a_log_scale():
    lengths = [len(p) for p in prompts("mixed:min=128,max=32768", 600)]
    assert 128 <= min(lengths) < 160
    assert 26_000 < max(lengths) <= 32_768
    assert sum(n < 2048 for n in lengths) / len(lengths) == pytest.approx(0.5, abs=0.08)


def test_shared_prefix_requests_share_their_prefix_and_nothing_more():
    made = prompts("shared-prefix:prefix=200,groups=2,input=30", 40)
    shared = {common_prefix(a, b) for a, b in itertools.combinations(made, 2)}
    assert all(n < 4 or 200 <= n < 204 for n in shared)
    assert any(n >= 200 for n in shared)
    assert any(n < 4 for n in shared)


def test_rag_asks_popular_documents_more_often():
    made = prompts("rag:documents=5,document=64,question=8,skew=1.5", 400)
    first = [bytes(p[:64]) for p in made]
    counts = sorted((first.count(d) for d in set(first)), reverse=True)
    assert len(counts) == 5
    assert counts[0] > 3 * counts[-1]


def answer(text="ok", ids=(7, 8), tokens=2):
    made = RequestRecord(index=0, stream=0, turn=0, intended_s=0, requested_tokens=tokens)
    made.answer_text, made.answer_ids, made.usage_output_tokens = [text], list(ids), tokens
    return made


def test_chat_turns_send_everything_said_before():
    [session] = sessions("chat:turns=3,system=20,input=10,output=2", 1)
    talk = PromptMaker("ids", words_of, TokenSource(0)).conversation(session, 0)
    first = talk.prompt(0)
    assert len(first) == 30
    talk.answered(0, answer())
    second = talk.prompt(1)
    assert np.array_equal(second[:30], first)
    assert second[30:32].tolist() == [7, 8]
    # A server that sends no ids: others of the same number stand in.
    talk.answered(1, answer(ids=(), tokens=4))
    third = talk.prompt(2)
    assert len(third) == 30 + 2 + 10 + 4 + 10
    assert np.array_equal(third[:42], second)


def test_chat_messages_carry_roles_and_the_real_answers():
    [session] = sessions("chat:turns=2,system=3,input=4", 1)
    talk = PromptMaker("messages", words_of, TokenSource(0)).conversation(session, 0)
    talk.prompt(0)
    talk.answered(0, answer("the answer"))
    messages = talk.prompt(1)
    assert [role for role, _ in messages] == ["system", "user", "assistant", "user"]
    assert messages[2][1] == "the answer"
    assert len(messages[1][1].split()) == 4


def test_prompts_are_cut_at_their_end_to_fit_the_model():
    [session] = sessions("fixed:input=100,output=20", 1)
    for form in ("ids", "text", "messages"):
        talk = PromptMaker(form, words_of, TokenSource(0), max_model_len=50).conversation(session, 0)
        prompt = talk.prompt(0)
        assert talk.clipped
        if form == "ids":
            assert np.array_equal(prompt, session.turns[0].token_ids[:30])
    uncut = PromptMaker("ids", words_of, TokenSource(0), max_model_len=120).conversation(session, 0)
    assert len(uncut.prompt(0)) == 100
    assert not uncut.clipped


@settings(max_examples=20)
@given(st.lists(st.integers(0, 31_999), min_size=1, max_size=50))
def test_equal_ids_give_equal_text_of_as_many_words(ids):
    token_ids = np.array(ids, dtype=np.uint32)
    assert words_of(token_ids) == words_of(token_ids.copy())
    assert len(words_of(token_ids).split()) == len(ids)


@pytest.mark.parametrize(
    "spec",
    [
        "nothing",
        "fixed:input",
        "fixed:color=1",
        "fixed:input=x",
        "fixed:input=0",
        "mixed:min=9,max=3",
        "rag:skew=-1",
        "trace",
    ],
)
def test_a_bad_workload_is_refused_in_one_line(spec):
    with pytest.raises(BenchError, match="workload"):
        parse_workload(spec)


def test_every_workload_explains_itself():
    for name in WORKLOADS:
        assert name in workload_help()
    assert describe_workload(parse_workload("fixed:input=3")) == {"name": "fixed", "input": 3, "output": 128}
    assert parse_workload("trace:/a/b.jsonl").path == "/a/b.jsonl"
