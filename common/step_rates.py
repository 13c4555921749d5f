"""How long an engine step takes, learned on line: a worker fits it, load reports carry it, placement predicts by it.

    step_s ≈ base_s + prefill_token_s · (prompt tokens in the step) + decode_token_s · (sequences that decode in it)

Least squares over exponentially forgotten steps, so it follows the load (context lengths, contention) within some
hundred steps. Pure: no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# First steps compile, page memory in, and pick algorithms: they say nothing about the next ones.
COLD_STEPS: Final = 4
# A step of so many times its prediction was interrupted by something else; it counts as this much.
OUTLIER_FACTOR: Final = 4.0
HALF_LIFE_STEPS: Final = 256
FIT_INTERVAL_STEPS: Final = 8
# Weight of the prior "all coefficients are 0", in steps of one token: it only matters where the data say nothing.
_RIDGE: Final = 1e-3
_NUM_FEATURES: Final = 3


@dataclass(frozen=True, slots=True)
class StepRates:
    """Seconds; none is negative."""

    base_s: float
    prefill_token_s: float
    decode_token_s: float

    def step_s(self, num_prefill_tokens: float, num_decode_tokens: float) -> float:
        """Of one step of this shape."""
        return self.base_s + self.prefill_token_s * num_prefill_tokens + self.decode_token_s * num_decode_tokens


class StepRateEstimator:
    """One engine's. Not thread-safe."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._decay = 0.5 ** (1 / HALF_LIFE_STEPS)
        # Moments of the features (1, prefill tokens, decode tokens) among themselves, and with the seconds.
        self._squares = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self._products = [0.0] * _NUM_FEATURES
        self._rates: StepRates | None = None

    def add(self, step_s: float, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """One step that ran. step_s: seconds."""
        self._num_steps += 1
        if self._num_steps <= COLD_STEPS:
            return
        if self._rates is not None and self._num_steps > 2 * COLD_STEPS:
            expected_s = self._rates.step_s(num_prefill_tokens, num_decode_tokens)
            step_s = min(step_s, OUTLIER_FACTOR * expected_s) if expected_s > 0 else step_s
        features = (1.0, float(num_prefill_tokens), float(num_decode_tokens))
        for i, a in enumerate(features):
            row = self._squares[i]
            for j, b in enumerate(features):
                row[j] = row[j] * self._decay + a * b
            self._products[i] = self._products[i] * self._decay + a * step_s
        if self._num_steps <= 2 * COLD_STEPS or self._num_steps % FIT_INTERVAL_STEPS == 0:
            self._rates = self._fit()

    @property
    def rates(self) -> StepRates | None:
        """None until a step after the cold ones has run."""
        return self._rates

    def _fit(self) -> StepRates:
        """Non-negative by leaving out, one by one, the feature whose coefficient is the most negative."""
        active = list(range(_NUM_FEATURES))
        solution = [0.0] * _NUM_FEATURES
        while active:
            values = _solve(
                [[self._squares[i][j] + (_RIDGE if i == j else 0.0) for j in active] for i in active],
                [self._products[i] for i in active],
            )
            worst = min(range(len(active)), key=values.__getitem__)
            if values[worst] >= 0:
                for i, value in zip(active, values, strict=True):
                    solution[i] = value
                break
            del active[worst]
        return StepRates(*solution)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a small positive definite system; both arguments are used up."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i][i]
        for k in range(i + 1, size):
            factor = matrix[k][i] / pivot
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (right[i] - known) / matrix[i][i]
    return solution
