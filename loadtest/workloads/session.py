"""The unit of load: a session of turns, of which a single-turn request is the shortest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from loadtest.tokens import EMPTY, TokenIds, TokenSource


@dataclass(frozen=True, slots=True)
class Turn:
    """token_ids: what the user adds in this turn. think_s: pause between the last answer and this turn."""

    token_ids: TokenIds
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """
    Turn k's prompt is system_ids + turns[0] + answer 0 + … + turns[k]. at_s: due time by the workload's own clock
    (traces), None where the arrival process alone decides.
    """

    turns: tuple[Turn, ...]
    system_ids: TokenIds = field(default_factory=lambda: EMPTY)
    at_s: float | None = None


class Workload(Protocol):
    """A frozen dataclass whose fields are the workload's settings; it holds no state between calls."""

    is_finite: ClassVar[bool]

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        """Deterministic in (source.seed, rng's seed); endless, save for traces."""
        ...
