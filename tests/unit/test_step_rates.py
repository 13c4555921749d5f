"""Step rates: the model is found from steps, follows a change, and believes neither cold starts nor hiccups."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.step_rates import COLD_STEPS, StepRateEstimator, StepRates

TRUE = StepRates(base_s=0.004, prefill_token_s=0.0003, decode_token_s=0.0005)


def run(estimator: StepRateEstimator, rates: StepRates, num_steps: int, seed: int = 1, noise: float = 0.05) -> None:
    rng = random.Random(seed)
    for _ in range(num_steps):
        prompt, decodes = rng.choice((0, 0, 64, 256, 512)), rng.randrange(1, 17)
        estimator.add(rates.step_s(prompt, decodes) * rng.uniform(1 - noise, 1 + noise), prompt, decodes)


def test_the_coefficients_are_found():
    estimator = StepRateEstimator()
    run(estimator, TRUE, 600)
    found = estimator.rates
    assert found.base_s == pytest.approx(TRUE.base_s, rel=0.25)
    assert found.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.1)
    assert found.decode_token_s == pytest.approx(TRUE.decode_token_s, rel=0.25)


def test_cold_steps_say_nothing():
    estimator = StepRateEstimator()
    for _ in range(COLD_STEPS):
        estimator.add(30.0, 16, 0)
        assert estimator.rates is None
    run(estimator, TRUE, 50, noise=0.0)
    assert estimator.rates.step_s(256, 8) == pytest.approx(TRUE.step_s(256, 8), rel=0.1)


def test_a_hiccup_changes_little_and_a_lasting_change_is_followed():
    estimator = StepRateEstimator()
    run(estimator, TRUE, 300)
    estimator.add(60.0, 0, 8)
    run(estimator, TRUE, 8)
    assert estimator.rates.step_s(0, 8) == pytest.approx(TRUE.step_s(0, 8), rel=0.3)
    twice = StepRates(2 * TRUE.base_s, 2 * TRUE.prefill_token_s, 2 * TRUE.decode_token_s)
    run(estimator, twice, 2000)
    assert estimator.rates.step_s(256, 8) == pytest.approx(twice.step_s(256, 8), rel=0.1)


steps = st.lists(
    st.tuples(st.floats(0, 100), st.integers(0, 100_000), st.integers(0, 1000)), min_size=COLD_STEPS + 1, max_size=80
)


@given(steps)
def test_whatever_the_steps_no_rate_is_negative_or_no_number(given_steps):
    estimator = StepRateEstimator()
    for step_s, prompt, decodes in given_steps:
        estimator.add(step_s, prompt, decodes)
    rates = estimator.rates
    for value in (rates.base_s, rates.prefill_token_s, rates.decode_token_s):
        assert 0 <= value < float("inf")


@pytest.mark.parametrize(("prompt", "decodes"), [(0, 16), (256, 0)])
def test_steps_of_one_shape_are_predicted_though_they_tell_no_coefficient(prompt, decodes):
    estimator = StepRateEstimator()
    for _ in range(100):
        estimator.add(0.02, prompt, decodes)
    assert estimator.rates.step_s(prompt, decodes) == pytest.approx(0.02, rel=0.05)
