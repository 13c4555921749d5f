"""Penalties, bias, min_tokens and logprobs are those of transformers and of plain torch, in any company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from common.engine.batch import SamplingExtras, ScheduledSequence
from common.engine.extras import sample_with_extras
from common.engine.logits import adjusted, token_logprobs
from common.engine.sampler import Sampler
from common.sampling_params import SamplingParams

VOCAB = 40
SAMPLER = Sampler()
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


def a_row(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def params(**asked: object) -> SamplingParams:
    return SamplingParams(max_tokens=50, **asked)  # type: ignore[arg-type]


def changed(row: torch.Tensor, asked: SamplingParams, tokens: Sequence[int], num_prompt: int) -> torch.Tensor:
    result = adjusted(row, asked, tokens, num_prompt, len(tokens) - num_prompt)
    assert result is not None
    return result


@given(TOKENS, st.floats(0.5, 2.0), st.integers(0, 9))
def test_repetition_penalty_is_transformers_over_prompt_and_output(tokens, penalty, seed) -> None:
    row = a_row(seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), row[None].clone())[0]
    if penalty == 1.0:
        return
    torch.testing.assert_close(changed(row, params(repetition_penalty=penalty), tokens, 1), expected)


@given(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), min_size=1, max_size=5))
def test_logit_bias_is_transformers_sequence_bias(bias) -> None:
    row = a_row()
    expected = SequenceBiasLogitsProcessor({(t,): v for t, v in bias.items()})(torch.tensor([[0]]), row[None])[0]
    torch.testing.assert_close(changed(row, params(logit_bias=tuple(sorted(bias.items()))), [0], 1), expected)


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_min_tokens_bans_stop_tokens_as_transformers_does(num_output: int) -> None:
    row, tokens = a_row(), list(range(3 + num_output))
    reference = MinNewTokensLengthLogitsProcessor(3, 2, [7, 9], device="cpu")
    expected = reference(torch.tensor([tokens]), row[None])[0]
    result = changed(row, params(min_tokens=2, stop_token_ids=(7, 9)), tokens, 3)
    torch.testing.assert_close(result, expected)


@given(TOKENS, TOKENS, st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_are_openais_over_the_output_alone(prompt, output, frequency, presence) -> None:
    """OpenAI: mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence."""
    row = a_row()
    asked = params(frequency_penalty=frequency, presence_penalty=presence)
    counts = torch.bincount(torch.tensor(output), minlength=VOCAB)
    expected = row - counts * frequency - (counts > 0) * presence
    if asked.changes_logits:
        torch.testing.assert_close(changed(row, asked, prompt + output, len(prompt)), expected)


def test_what_changes_nothing_costs_no_copy_and_what_does_leaves_the_row_alone() -> None:
    row = a_row()
    before = row.clone()
    assert adjusted(row, params(), [1, 2], 1, 1) is None
    changed(row, params(repetition_penalty=1.5, presence_penalty=1.0, logit_bias=((3, 5.0),)), [1, 2], 1)
    assert torch.equal(row, before)


@given(st.integers(0, 50), st.integers(0, VOCAB - 1), st.integers(0, VOCAB))
def test_logprobs_are_log_softmax_with_ranks(seed: int, token: int, num_top: int) -> None:
    row = a_row(seed)
    expected = row.double().log_softmax(0)
    told = token_logprobs(row, token, num_top)
    assert told.logprob == pytest.approx(expected[token].item(), abs=1e-5)
    assert told.rank == 1 + int((expected > expected[token]).sum())
    order = expected.argsort(descending=True)[:num_top].tolist()
    assert [t for t, _ in told.top] == order
    assert [v for _, v in told.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


# ---- a whole step


def extras(tokens: Sequence[int], num_prompt: int, **more: object) -> SamplingExtras:
    return SamplingExtras(tokens, num_prompt, **more)  # type: ignore[arg-type]


def scheduled(sampling: SamplingParams | None, more: SamplingExtras | None = None, num_tokens: int = 1, index: int = 0):
    return ScheduledSequence([0] * num_tokens, 0, [0], sampling, index, extras=more)


def test_a_penalised_row_draws_the_same_in_any_company() -> None:
    rows = torch.stack([a_row(s) for s in range(3)])
    plain, asked = params(seed=1), params(seed=2, presence_penalty=2.0, logprobs=3)
    sequence = scheduled(asked, extras([1, 2, 2], 1), index=2)
    alone = sample_with_extras(SAMPLER, [sequence], rows[1:2])
    crowd = sample_with_extras(SAMPLER, [scheduled(plain), sequence, scheduled(plain)], rows)
    assert crowd.token_ids[1] == alone.token_ids[0]
    assert crowd.extras[1] == alone.extras[0]
    assert crowd.token_ids[0] == SAMPLER.sample(rows[:1], [plain], [0])[0]
    assert set(crowd.extras) == {1}


def test_logprobs_are_the_models_own_whatever_the_token_was_drawn_from() -> None:
    row = a_row()
    asked = params(temperature=0.0, logit_bias=((5, 100.0),), logprobs=0)
    result = sample_with_extras(SAMPLER, [scheduled(asked, extras([1], 1))], row[None])
    assert result.token_ids == [5]
    assert result.extras[0].logprobs == token_logprobs(row, 5, 0)


def test_forks_draw_as_requests_of_their_own() -> None:
    row, asked = a_row(), params(seed=1, logprobs=1)
    result = sample_with_extras(SAMPLER, [scheduled(asked, extras([1], 1, fork_seeds=(8, 9)))], row[None])
    for seed, (token, told) in zip((8, 9), result.extras[0].forks, strict=True):
        alone = sample_with_extras(SAMPLER, [scheduled(replace(asked, seed=seed), extras([1], 1))], row[None])
        assert token == alone.token_ids[0]
        assert told == alone.extras[0].logprobs


def test_prompt_logprobs_are_those_of_the_tokens_that_follow() -> None:
    rows = torch.stack([a_row(s) for s in range(4)])
    more = extras([3, 4, 5], 3, prompt_targets=[4, 5], num_prompt_logprobs=2)
    asked = params(prompt_logprobs=2, temperature=0.0)
    result = sample_with_extras(SAMPLER, [scheduled(params(temperature=0.0)), scheduled(asked, more, 3)], rows)
    assert result.extras[1].prompt_logprobs == (token_logprobs(rows[1], 4, 2), token_logprobs(rows[2], 5, 2))
    assert result.token_ids == [rows[0].argmax(), rows[3].argmax()]
    chunk = scheduled(None, extras([3, 4, 5, 6], 4, prompt_targets=[4, 5]), 2)
    cut = sample_with_extras(SAMPLER, [chunk], rows[:2])
    assert cut.token_ids == [None]
    assert [t.token_id for t in cut.extras[0].prompt_logprobs] == [4, 5]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_damaged_row_fails_its_own_sequence(bad: float) -> None:
    rows = torch.stack([a_row(s) for s in range(3)])
    clean = sample_with_extras(SAMPLER, [scheduled(params(logprobs=1), extras([1], 1))], rows[2:])
    rows[0, 3] = bad
    told = scheduled(params(logprobs=1), extras([1], 1))
    result = sample_with_extras(SAMPLER, [told, scheduled(params()), told], rows)
    assert result.token_ids[0] is None
    assert "not finite" in str(result.extras[0].error)
    assert result.token_ids[1] is not None
    assert (result.token_ids[2], result.extras[2]) == (clean.token_ids[0], clean.extras[0])
