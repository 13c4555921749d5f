"""The GPU's sampler, run by Triton's interpreter, draws the very tokens that the torch sampler draws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.logits import token_logprobs
from common.engine.random_bits import gumbel_noise, random_key
from common.engine.sampler import Sampler
from common.kernels.triton.sampler import TritonSampler
from common.sampling_params import SamplingParams

REFERENCE, TRITON = Sampler(), TritonSampler()


def params(**kwargs: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **kwargs)  # type: ignore[arg-type]


def random_logits(seed: int, rows: int, vocab: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


asked = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, 400, 5000]),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=12)
@given(
    st.integers(0, 99), st.sampled_from([1, 300, 2049, 5000]), st.lists(asked, min_size=1, max_size=3), st.booleans()
)
def test_tokens_equal_the_torch_samplers(seed: int, vocab: int, wanted: list[SamplingParams], tied: bool) -> None:
    """tied: many equal logits, on both sides of every filter's border."""
    logits = random_logits(seed, len(wanted), vocab)
    logits = logits.round() if tied else logits
    indices = range(seed, seed + len(wanted))
    assert TRITON.sample(logits, wanted, indices) == REFERENCE.sample(logits, wanted, indices)


def test_a_draw_that_nothing_filters_equals_the_torch_samplers() -> None:
    logits = random_logits(1, 1, 5000).expand(8, -1)
    wanted = [params(temperature=1.0, seed=2**63 + 5)] * 8
    tokens = TRITON.sample(logits, wanted, range(8))
    assert tokens == REFERENCE.sample(logits, wanted, range(8))
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_no_token(value: float) -> None:
    logits = random_logits(0, 4, 300)
    logits[1, 7] = value
    logits[2] = -math.inf
    logits[3, 5:] = -math.inf  # masked tokens are no fault
    wanted = [params(temperature=0.0), *[params(temperature=1.0)] * 3]
    tokens = TRITON.sample(logits, wanted, [0] * 4)
    assert tokens == REFERENCE.sample(logits, wanted, [0] * 4)
    assert [token is None for token in tokens] == [False, True, True, False]


def test_equal_logits_share_the_nucleus_by_id() -> None:
    """Ten equal tokens, half their mass: the first five, and each of them is drawn."""
    wanted = [params(temperature=1.0, top_p=0.5, seed=i) for i in range(32)]
    tokens = TRITON.sample(torch.zeros(1, 10).expand(32, -1), wanted, [0] * 32)
    assert set(tokens) == set(range(5))


def test_logprobs_equal_the_torch_ones() -> None:
    row = random_logits(3, 1, 5000)[0].round()
    for token in (0, int(row.argmax()), 4999):
        found, expected = TRITON.logprobs(row, token, 3), token_logprobs(row, token, 3)
        assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
        assert [i for i, _ in found.top] == [i for i, _ in expected.top]
        values = [found.logprob, *(value for _, value in found.top)]
        assert values == pytest.approx([expected.logprob, *(value for _, value in expected.top)], abs=1e-5)


def test_noise_is_the_torch_samplers() -> None:
    """An empty contest: with all logits equal and nothing else, the winner is the largest noise of the run."""
    vocab = 100  # a single run
    for index in range(8):
        noise = gumbel_noise(torch.tensor(random_key(9, index)), torch.arange(vocab))
        assert TRITON.sample(torch.zeros(1, vocab), [params(temperature=1.0, seed=9)], [index]) == [int(noise.argmax())]
