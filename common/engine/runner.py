"""What a scheduler needs of the engine: run one step, get its tokens. Schedulers' tests put a fake behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.engine.batch import ScheduledSequence


class Runner(Protocol):
    """One device's engine. `execute` blocks for a whole step: call it from a thread of its own, one call at a time."""

    def execute(self, scheduled: Sequence[ScheduledSequence]) -> list[int | None]:
        """Run a step. One entry a sequence, in order: the sampled token's id, or None where sampling is None."""
        ...
