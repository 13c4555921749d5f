"""Memory running short: admission closes first, then what runs gives way; a step without memory costs nobody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.batch import ScheduledSequence
from common.engine.messages import MemoryCommand, MemoryPressure
from common.engine.runner import StepResult
from common.engine.splitting_runner import SplittingRunner
from common.errors import ErrorKind
from common.kvcache.block_pool import BlockPool
from common.sampling_params import SamplingParams
from common.worker.memory_guard import MemoryLimits, host_used_ratio, next_pressure
from tests.unit.engine_fakes import FakeKv, FakeRunner, make_spec, reference_output, reserve
from tests.unit.test_decode_scheduler import PROMPT, Decode

LIMITS = MemoryLimits(close=0.9)
OPEN, CLOSED, SHED = MemoryPressure


@given(st.sampled_from(MemoryPressure), st.floats(0, 1.2))
def test_admission_closes_before_anybody_gives_way_and_opens_only_with_room(now, used):
    after = next_pressure(now, used, LIMITS)
    assert (after is SHED) == (used >= 0.95)
    assert after is not OPEN or used < 0.9
    assert used >= 0.88 or after is OPEN
    assert next_pressure(now, used, MemoryLimits(1.0)) is OPEN


def test_a_containers_limit_counts_and_droppable_caches_do_not(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000\n")
    assert host_used_ratio(tmp_path) == pytest.approx(4.5)
    (tmp_path / "memory.max").write_text("max\n")
    assert 0 < host_used_ratio(tmp_path) < 1


def test_short_of_memory_new_work_is_refused_then_half_gives_way_and_every_text_is_right():
    d = Decode(num_blocks=64, max_running=8)
    specs = {name: make_spec(name, PROMPT, max_tokens=12) for name in "abcd"}
    d.round(*[reserve(spec, prefill_here=True) for spec in specs.values()])
    d.round(MemoryCommand(CLOSED), reserve(make_spec("late", PROMPT), prefill_here=True))
    error = d.leg("late").error
    assert error is not None
    assert error.kind is ErrorKind.OVERLOADED
    assert d.news is not None
    assert d.news.load.num_free_blocks == 0, "nobody is sent here"
    assert len(d.scheduler._running) == 4
    for at_once in (2, 1, 1):
        d.round(MemoryCommand(SHED))
        assert len(d.scheduler._running) == at_once
    d.round(MemoryCommand(OPEN))
    while d.scheduler.num_open:
        d.round()
    for name, spec in specs.items():
        expected, _ = reference_output(spec.token_ids, len(PROMPT), spec.sampling, d.config.max_model_len)
        assert d.leg(name).tokens == expected


class TightRunner:
    """Has memory for so many tokens a step; fails halfway through a larger one."""

    def __init__(self, runner: FakeRunner, most: int, error: Exception) -> None:
        self.runner, self.most, self.error = runner, most, error

    def execute(self, scheduled) -> StepResult:
        if sum(len(s.token_ids) for s in scheduled) > self.most:
            self.runner.execute(scheduled[:1])
            raise self.error
        return self.runner.execute(scheduled)


def step(kv: FakeKv, pool: BlockPool, lengths: list[int]) -> list[ScheduledSequence]:
    rows = []
    for i, length in enumerate(lengths):
        blocks = pool.allocate(-(-length // kv.block_size))
        assert blocks is not None
        sampling = SamplingParams(max_tokens=1, seed=i) if i % 3 != 2 else None
        rows.append(ScheduledSequence([i + k for k in range(length)], 0, blocks, sampling))
    return rows


@pytest.mark.parametrize("error", [MemoryError("native"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 30))
def test_a_step_in_parts_is_the_step(error, lengths, most):
    kv, pool = FakeKv(64, 4), BlockPool(64)
    scheduled = step(kv, pool, lengths)
    whole = FakeRunner(kv, pool).execute(scheduled)
    kv.slots = [[None] * 4 for _ in range(64)]
    parts = SplittingRunner(TightRunner(FakeRunner(kv, pool), most, error), 4).execute(scheduled)
    assert (parts.token_ids, parts.extras) == (whole.token_ids, {})


def test_who_has_no_memory_even_alone_fails_alone():
    kv, pool = FakeKv(64, 4), BlockPool(64)
    scheduled = step(kv, pool, [3, 3, 3])

    class Picky(FakeRunner):
        def execute(self, scheduled):
            if any(s.token_ids[0] == 1 for s in scheduled):
                raise MemoryError("this one")
            return super().execute(scheduled)

    result = SplittingRunner(Picky(kv, pool), 4).execute(scheduled)
    error = result.extras[1].error
    assert error is not None
    assert set(result.extras) == {1}
    assert result.token_ids[0] is not None


def test_another_error_is_not_taken_for_a_lack_of_memory():
    class Broken:
        def execute(self, scheduled):
            raise RuntimeError("kernel")

    with pytest.raises(RuntimeError, match="kernel"):
        SplittingRunner(Broken(), 4).execute([])
