"""Whether an engine is alive: silence is counted only while the listener was awake, and a long step is not death."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.engine.cost_rates import CostRates
from common.engine.messages import StepShape
from common.silence import SilenceTimer
from common.step_rates import StepRates
from common.worker.liveness import Liveness, LivenessLimits, allowed_silence_s, judge

LIMITS = LivenessLimits(stall_s=2.0, exit_s=10.0)
RATES = StepRates(base_s=0.01, prefill_token_s=0.001, decode_token_s=0.005)
MEASURED = CostRates(token_ns=1_000_000, attention_tokens=1 << 12, block_copy_ns=1, step_ns=1_000_000)


def verdict(silence_s: float, step: StepShape | None, learned: StepRates | None = RATES) -> Liveness:
    return judge(LIMITS, silence_s, allowed_silence_s(LIMITS, step, learned, MEASURED))


def test_an_engine_between_steps_is_stalled_and_then_lost():
    assert verdict(1.9, None) is Liveness.WELL
    assert verdict(2.0, None) is Liveness.STALLED
    assert verdict(9.9, None) is Liveness.STALLED
    assert verdict(10.0, None) is Liveness.LOST


def test_a_long_step_is_allowed_for_and_a_short_one_is_not():
    assert verdict(15.0, StepShape(1, 2000, 0)) is Liveness.WELL
    assert verdict(17.0, StepShape(1, 2000, 0)) is Liveness.STALLED
    assert verdict(2.0, StepShape(8, 0, 8)) is Liveness.STALLED


def test_first_steps_get_time_to_warm_up():
    assert verdict(9.9, StepShape(1, 16, 0), learned=None) is Liveness.WELL
    assert verdict(10.0, StepShape(1, 16, 0), learned=None) is Liveness.STALLED
    assert verdict(20.0, StepShape(1, 4096, 0), learned=None) is Liveness.WELL


@given(st.floats(0, 100), st.integers(0, 4096), st.integers(0, 64))
def test_no_verdict_is_harsher_for_a_larger_step(silence_s, num_prefill, num_decode):
    order = list(Liveness)
    small, large = StepShape(1, num_prefill, num_decode), StepShape(1, num_prefill + 1, num_decode + 1)
    assert order.index(verdict(silence_s, large)) <= order.index(verdict(silence_s, small))


@given(st.lists(st.floats(0.0, 50.0), max_size=20))
def test_what_was_slept_through_is_no_silence_of_others(gaps):
    timer, now = SilenceTimer(0.1, 0.0), 0.0
    for gap_s in gaps:
        now += gap_s
        timer.look(now)
    assert timer.seconds <= min(now, 0.2 * len(gaps)) + 1e-9
    timer.heard()
    assert timer.look(now) == 0.0


def test_silence_is_counted_in_full_by_who_looks_in_time():
    timer = SilenceTimer(0.1, 5.0)
    for i in range(1, 11):
        timer.look(5.0 + 0.1 * i)
    assert abs(timer.seconds - 1.0) < 1e-6
