"""Whether an engine is alive, by its own heartbeat: pure.

An engine's loop beats when a round begins and around each step; idle, four times a second. During a step it can't: so
a step is allowed what one of its size takes, many times over, before it counts as stuck.

    silent for   < allowed    ≥ allowed                   ≥ allowed + (exit_s − stall_s)
                 WELL         STALLED: unready, no work   LOST: the worker ends, to be started again
    allowed      stall_s between steps; in a step, no less than STEP_FACTOR times what it should take
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from common.engine.cost_rates import CostRates
from common.engine.messages import StepShape
from common.step_rates import StepRates

# On a machine that others use as well a step may take several times its usual time.
STEP_FACTOR: Final = 8.0
# Before any steps were timed: the first ones grow buffers and page memory in.
COLD_STALL_S: Final = 10.0


class Liveness(StrEnum):
    WELL = "well"
    STALLED = "stalled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """Seconds of silence of an engine between steps. stall_s: until it is stalled. exit_s: until its worker ends."""

    stall_s: float
    exit_s: float


def allowed_silence_s(
    limits: LivenessLimits, step: StepShape | None, learned: StepRates | None, measured: CostRates
) -> float:
    """step: what the engine computes now, None between steps. learned: None until steps have been timed."""
    if step is None:
        return limits.stall_s
    if learned is not None:
        expected_s = learned.step_s(step.num_prefill_tokens, step.num_decode_tokens)
        return max(limits.stall_s, STEP_FACTOR * expected_s)
    num_tokens = step.num_prefill_tokens + step.num_decode_tokens
    expected_s = (measured.compute_ns(0, num_tokens) + measured.step_ns) / 1e9
    return max(COLD_STALL_S, STEP_FACTOR * expected_s)


def judge(limits: LivenessLimits, silence_s: float, allowed_s: float) -> Liveness:
    if silence_s < allowed_s:
        return Liveness.WELL
    more_s = max(0.0, limits.exit_s - limits.stall_s)
    return Liveness.STALLED if silence_s < allowed_s + more_s else Liveness.LOST
