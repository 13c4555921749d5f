"""Runs a step in parts where there is no memory for the whole: an allocation that fails costs nobody their request.

    step [a b c d] ──no memory──► [a b] [c d] ──no memory──► [c] [d] ──no memory──► d's chunk, half by half ──► d fails

A step may be run again, in any parts: KV is written at positions that are the step's own, blocks are copied from what
nobody changes before them, and a token depends on (seed, position) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.device import release_cached_memory
from common.engine.batch import ScheduledSequence
from common.engine.runner import Runner, SampledExtras, StepResult
from common.errors import BatonError, ErrorKind
from common.telemetry import get_logger

_log = get_logger(__name__)


class SplittingRunner:
    """Implements Runner on another one. block_size: tokens of a KV block."""

    def __init__(self, runner: Runner, block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size

    def execute(self, scheduled: Sequence[ScheduledSequence]) -> StepResult:
        """See Runner.execute. A sequence for which there is no memory even alone fails alone."""
        try:
            return self._runner.execute(scheduled)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            num_tokens = sum(len(s.token_ids) for s in scheduled)
            _log.warning("no memory for a step: running it in parts", sequences=len(scheduled), tokens=num_tokens)
        # Outside the handler: its traceback would keep the failed step's tensors alive.
        release_cached_memory()
        if len(scheduled) > 1:
            middle = len(scheduled) // 2
            return _joined(self.execute(scheduled[:middle]), self.execute(scheduled[middle:]), middle)
        return self._run_chunk(scheduled[0])

    def _run_chunk(self, only: ScheduledSequence) -> StepResult:
        middle = len(only.token_ids) // 2
        if middle == 0 or only.extras is not None:
            message = "no memory for a step of this request alone"
            return StepResult([None], {0: SampledExtras(error=BatonError(ErrorKind.LEASE_LOST, message))})
        end = only.start + middle
        table = only.block_table[: -(-end // self._block_size)]
        first = self.execute([replace(only, token_ids=only.token_ids[:middle], block_table=table, sampling=None)])
        if first.extras:
            return first
        return self.execute([replace(only, token_ids=only.token_ids[middle:], start=end, copy=None)])


def is_out_of_memory(error: Exception) -> bool:
    """torch's allocator of host memory has no exception of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _joined(first: StepResult, second: StepResult, num_first: int) -> StepResult:
    extras = {**first.extras, **{num_first + index: extra for index, extra in second.extras.items()}}
    return StepResult([*first.token_ids, *second.token_ids], extras)
