"""Workloads whose prompts share tokens: system prompts, documents, and conversations that grow.

shared-prefix   [prefix of group g........][own]
rag             [document d (long)........][question]
chat            [system][user 1][answer 1][user 2][answer 2][user 3]…   each turn sends all that came before
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loadtest.errors import BenchError
from loadtest.tokens import TokenSource
from loadtest.workloads.session import Session, Turn
from loadtest.workloads.synthetic import require_positive


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """`groups` prefixes of `prefix` tokens, each request under one of them, picked evenly at random."""

    is_finite: ClassVar[bool] = False
    prefix: int = 1024
    groups: int = 1
    input: int = 32
    output: int = 64

    def __post_init__(self) -> None:
        require_positive("shared-prefix", prefix=self.prefix, groups=self.groups, input=self.input, output=self.output)

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        index = 0
        while True:
            prefix = source.span(source.key("prefix", rng.randrange(self.groups)), self.prefix)
            own = source.span(source.key("own", index), self.input)
            yield Session((Turn(np.concatenate([prefix, own]), self.output),))
            index += 1


@dataclass(frozen=True, slots=True)
class Rag:
    """Short questions about few long documents. skew: Zipf exponent of the documents' popularity, 0 is even."""

    is_finite: ClassVar[bool] = False
    documents: int = 8
    document: int = 4096
    question: int = 32
    output: int = 64
    skew: float = 1.0

    def __post_init__(self) -> None:
        require_positive(
            "rag", documents=self.documents, document=self.document, question=self.question, output=self.output
        )
        if self.skew < 0:
            raise BenchError(f"workload rag: skew must not be below 0, not {self.skew:g}")

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        weights = [1.0 / (rank + 1) ** self.skew for rank in range(self.documents)]
        ranks = range(self.documents)
        index = 0
        while True:
            [chosen] = rng.choices(ranks, weights)
            document = source.span(source.key("document", chosen), self.document)
            question = source.span(source.key("own", index), self.question)
            yield Session((Turn(np.concatenate([document, question]), self.output),))
            index += 1


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations of `turns` turns under one system prompt; each turn sends the earlier answers back.

    think_s: mean of the exponential pause before each turn but the first.
    """

    is_finite: ClassVar[bool] = False
    turns: int = 4
    system: int = 128
    input: int = 64
    output: int = 64
    think_s: float = 1.0

    def __post_init__(self) -> None:
        require_positive("chat", turns=self.turns, input=self.input, output=self.output)
        if self.system < 0 or self.think_s < 0:
            raise BenchError("workload chat: system and think_s must not be below 0")

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        system = source.span(source.key("system"), self.system)
        index = 0
        while True:
            turns = tuple(
                Turn(
                    source.span(source.key("own", index, turn), self.input),
                    self.output,
                    rng.expovariate(1 / self.think_s) if turn and self.think_s else 0.0,
                )
                for turn in range(self.turns)
            )
            yield Session(turns, system)
            index += 1
