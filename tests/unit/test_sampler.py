"""Draws follow the asked distribution, and depend on (logits, seed, output index) and on nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.random_bits import gumbel_noise, random_key
from common.engine.sampler import Sampler
from common.sampling_params import SamplingParams

SAMPLER = Sampler()


def params(**kwargs: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **kwargs)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, asked: SamplingParams, output_index: int = 0) -> int:
    return SAMPLER.sample(logits[None], [asked], [output_index])[0]


def draws(logits: torch.Tensor, count: int, **kwargs: float) -> np.ndarray:
    """Tokens number 0 … count - 1 of one request whose logits never change."""
    asked = params(**kwargs)
    step = 100  # small enough that torch starts no threads
    return np.concatenate(
        [
            SAMPLER.sample(logits.expand(step, -1), [asked] * step, range(start, start + step))
            for start in range(0, count, step)
        ]
    )


# ---- the oracle: filters and noise, in numpy and float64, without a shortcut


def splitmix(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def oracle_bits(seed: int, output_index: int, counter: int) -> int:
    gamma = 0x9E3779B97F4A7C15
    key = splitmix((splitmix(seed) + (output_index + 1) * gamma) % 2**64)
    return splitmix((key + (counter + 1) * gamma) % 2**64)


def oracle_noise(seed: int, output_index: int, counter: int) -> float:
    uniform = ((oracle_bits(seed, output_index, counter) >> 11) + 0.5) / 2**53
    return -math.log(-math.log(uniform))


def oracle_support(logits: Sequence[float], asked: SamplingParams) -> list[int]:
    scaled = np.asarray(logits, dtype=np.float32)
    scaled = (scaled - scaled.max()) / np.float32(asked.temperature)
    kept = np.argsort(-scaled, kind="stable")
    if asked.top_k:
        kept = kept[scaled[kept] >= np.sort(scaled)[::-1][min(asked.top_k, len(scaled)) - 1]]
    if asked.top_p < 1:
        mass = np.exp(scaled[kept].astype(np.float64))
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        kept = kept[(before < asked.top_p * mass.sum()) | (before == 0.0)]
    if asked.min_p:
        kept = kept[scaled[kept] >= np.float32(math.log(asked.min_p))]
    return sorted(kept.tolist())


def oracle_draw(logits: Sequence[float], asked: SamplingParams, output_index: int) -> int:
    scaled = np.asarray(logits, dtype=np.float32)
    scaled = (scaled - scaled.max()) / np.float32(asked.temperature)
    support = oracle_support(logits, asked)
    noisy = [float(scaled[i]) + oracle_noise(asked.seed, output_index, i) for i in support]
    return support[int(np.argmax(noisy))]


# ---- noise


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 2**40))
def test_noise_is_splitmix64_of_seed_index_and_counter(seed: int, output_index: int, counter: int) -> None:
    noise = gumbel_noise(torch.tensor(random_key(seed, output_index)), torch.tensor([counter]))
    assert noise.item() == pytest.approx(oracle_noise(seed, output_index, counter), rel=1e-12, abs=1e-12)


def test_splitmix64_gives_its_published_sequence() -> None:
    """First outputs for state 1234567 (the vectors of Rosetta Code and of many libraries' tests)."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [splitmix((1234567 + n * gamma) % 2**64) for n in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_is_gumbel_and_finite() -> None:
    noise = gumbel_noise(torch.tensor(random_key(7, 0)), torch.arange(200_000))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_neighbouring_seeds_and_indices_are_unrelated() -> None:
    noise = [
        gumbel_noise(torch.tensor(random_key(seed, i)), torch.arange(20_000)) for seed, i in ((0, 0), (0, 1), (1, 0))
    ]
    correlations = torch.corrcoef(torch.stack(noise)) - torch.eye(3)
    assert correlations.abs().max() < 0.03


# ---- greedy


def test_greedy_is_the_first_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, -1.0]])
    assert SAMPLER.sample(logits, [params(temperature=0.0)] * 2, [0, 9]) == [1, 0]


def test_no_rows_no_tokens() -> None:
    assert SAMPLER.sample(torch.empty(0, 10), [], []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_damaged_row_has_no_token_and_harms_no_other(bad: float) -> None:
    logits = torch.zeros(3, 5)
    alone = SAMPLER.sample(logits[:1], [params()], [0])
    logits[1, 3] = bad
    for temperature in (0.0, 1.0):
        tokens = SAMPLER.sample(logits, [params(), params(temperature=temperature), params()], [0, 0, 0])
        assert tokens == [*alone, None, *alone]


# ---- distributions: chi-square at fixed seeds, so each test always gives the same answer


def assert_distribution(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square against its 99.9 % quantile (Wilson and Hilferty's approximation)."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * len(tokens)
    statistic = ((counts[probabilities > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < quantile


def softmax(logits: torch.Tensor, temperature: float) -> np.ndarray:
    return (logits.double() / temperature).softmax(-1).numpy()


@pytest.mark.parametrize(("vocab", "temperature"), [(5, 1.0), (128, 1.7), (300, 0.5), (300, 1.0)])
def test_unfiltered_draws_follow_the_softmax(vocab: int, temperature: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    tokens = draws(logits, 4_000, temperature=temperature, seed=11)
    assert_distribution(tokens, softmax(logits, temperature))


@pytest.mark.parametrize("filters", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}])
def test_filtered_draws_follow_the_renormalised_softmax(filters: dict[str, float]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5))
    support = oracle_support(logits.tolist(), params(**filters))
    assert 1 < len(support) < 40
    probabilities = np.zeros(40)
    probabilities[support] = softmax(logits, 1.0)[support]
    assert_distribution(draws(logits, 3_000, seed=3, **filters), probabilities / probabilities.sum())


def test_seeds_are_independent_requests() -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2))
    count = 2_000
    tokens = SAMPLER.sample(logits.expand(count, -1), [params(seed=i) for i in range(count)], [0] * count)
    assert_distribution(np.asarray(tokens), softmax(logits, 1.0))


# ---- filters and draws against the oracle

# Multiples of an eighth, so that ties are frequent and sums don't hinge on rounding.
logit = st.integers(-60, 60).map(lambda n: n / 8)
asked_params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 500]),
    top_p=st.sampled_from([1.0, 0.9123, 0.5017, 0.0503]),
    min_p=st.sampled_from([0.0, 0.0213, 0.4, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=200)
@given(st.lists(logit, min_size=1, max_size=30), asked_params, st.integers(0, 1000))
def test_a_filtered_draw_is_the_oracles(logits: list[float], asked: SamplingParams, output_index: int) -> None:
    token = draw(torch.tensor(logits), asked, output_index)
    if 0 < asked.top_k < len(logits) or asked.top_p < 1 or asked.min_p:
        assert token == oracle_draw(logits, asked, output_index)
    assert token in oracle_support(logits, asked)


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_over_a_large_vocabulary_is_the_oracles(spread: float, top_p: float) -> None:
    """From peaked to flat: whichever part of the vocabulary had to be sorted."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(8)) * spread
    asked = params(top_p=top_p, seed=21)
    expected = [oracle_draw(logits.tolist(), asked, i) for i in range(3)]
    assert [draw(logits, asked, i) for i in range(3)] == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_impossible_tokens_are_never_drawn(filters: dict[str, float]) -> None:
    logits = torch.full((400,), -math.inf)
    logits[[3, 399]] = torch.tensor([1.0, 0.5])
    assert set(draws(logits, 500, seed=1, **filters).tolist()) == {3, 399}


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_uniform() -> None:
    logits = torch.tensor([1.0, 1.5, 1.25])
    assert set(draws(logits, 500, temperature=1e-30, seed=1).tolist()) == {1}
    assert_distribution(draws(logits, 3_000, temperature=1e30, seed=1), np.full(3, 1 / 3))


# ---- independence


@settings(max_examples=60)
@given(st.lists(st.tuples(asked_params, st.integers(0, 99)), min_size=1, max_size=8), st.randoms(), st.booleans())
def test_a_draw_does_not_depend_on_the_batch(
    rows: list[tuple[SamplingParams, int]], random: object, with_greedy: bool
) -> None:
    """Alone, or among others, in any order: each row draws the same token."""
    logits = torch.randn(len(rows), 333, generator=torch.Generator().manual_seed(4)) * 3
    if with_greedy:
        rows = [*rows[:-1], (params(temperature=0.0), 0)]
    alone = [draw(row, asked, i) for row, (asked, i) in zip(logits, rows, strict=True)]
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    together = SAMPLER.sample(logits[order], [rows[n][0] for n in order], [rows[n][1] for n in order])
    assert together == [alone[n] for n in order]


def test_draws_are_the_same_in_every_process_and_version() -> None:
    """Fixed answers: a change here breaks the promise that a migrated stream continues with the same text."""
    logits = torch.arange(300).remainder(7).float()
    tokens = [draw(logits, params(seed=1234), i) for i in range(6)]
    filtered = [draw(logits, params(seed=1234, top_k=50), i) for i in range(6)]
    assert (tokens, filtered) == ([41, 45, 103, 209, 159, 223], [265, 216, 272, 118, 76, 223])


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    SAMPLER.sample(logits, [params(), params(top_p=0.5), params(temperature=0.0)], [0, 0, 0])
    assert torch.equal(logits, before)
