"""Single-turn workloads without sharing: fixed, ShareGPT-like and mixed lengths. Every prompt is new to the server."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from loadtest.errors import BenchError
from loadtest.tokens import TokenSource
from loadtest.workloads.session import Session, Turn


def require_positive(workload: str, **values: float) -> None:
    """Raises BenchError for the first value that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise BenchError(f"workload {workload}: {name} must be above 0, not {value:g}")


def _single(source: TokenSource, index: int, length: int, max_tokens: int) -> Session:
    return Session((Turn(source.span(source.key("own", index), length), max_tokens),))


@dataclass(frozen=True, slots=True)
class Fixed:
    """All requests alike: `input` prompt tokens, `output` answer tokens."""

    is_finite: ClassVar[bool] = False
    input: int = 512
    output: int = 128

    def __post_init__(self) -> None:
        require_positive("fixed", input=self.input, output=self.output)

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        index = 0
        while True:
            yield _single(source, index, self.input, self.output)
            index += 1


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """Lognormal lengths, cut at the caps.

    The defaults give the means of the ShareGPT set (161 tokens in, 338 out: Kwon et al., SOSP 2023, section 6.1).
    """

    is_finite: ClassVar[bool] = False
    input_median: float = 60.0
    input_sigma: float = 1.4
    output_median: float = 220.0
    output_sigma: float = 0.93
    min_tokens: int = 4
    max_input: int = 2048
    max_output: int = 1024

    def __post_init__(self) -> None:
        require_positive(
            "sharegpt",
            input_median=self.input_median,
            output_median=self.output_median,
            min_tokens=self.min_tokens,
            max_input=self.max_input,
            max_output=self.max_output,
        )

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        def length(median: float, sigma: float, cap: int) -> int:
            drawn = rng.lognormvariate(math.log(median), sigma)
            return max(min(self.min_tokens, cap), min(cap, round(drawn)))

        index = 0
        while True:
            num_input = length(self.input_median, self.input_sigma, self.max_input)
            yield _single(source, index, num_input, length(self.output_median, self.output_sigma, self.max_output))
            index += 1


@dataclass(frozen=True, slots=True)
class Mixed:
    """Prompt lengths log-uniform in [min, max]: as many requests between 128 and 256 tokens as between 16k and 32k."""

    is_finite: ClassVar[bool] = False
    min: int = 128
    max: int = 32_768
    output: int = 128

    def __post_init__(self) -> None:
        require_positive("mixed", min=self.min, max=self.max, output=self.output)
        if self.min > self.max:
            raise BenchError(f"workload mixed: min {self.min} is above max {self.max}")

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        low, high = math.log(self.min), math.log(self.max)
        index = 0
        while True:
            length = round(math.exp(low + (high - low) * rng.random()))
            yield _single(source, index, max(self.min, min(self.max, length)), self.output)
            index += 1
