"""The engine's thread: commands in, news out, failures contained, always joinable. Waits are for events, bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

import pytest

from common.engine.engine_thread import EngineThread, Inbox
from common.engine.messages import AbortCommand, EngineNews, LegOutput, StepShape
from common.errors import ErrorKind
from common.kvcache.block_pool import BlockPool
from common.kvcache.prefix_cache import PrefixCache
from common.sampling_params import FinishReason
from decode_service.scheduler import DecodeScheduler
from kv_transfer.types import WorkerIdentity
from tests.processes import becomes_true
from tests.unit.engine_fakes import FakeKv, FakeReceiver, FakeRunner, make_config, make_spec, reference_output, reserve

BOUND_S = 20.0


class Harness:
    """A real thread around a decode scheduler and fakes."""

    def __init__(self) -> None:
        self.pool = BlockPool(64)
        self.kv = FakeKv(64, 4)
        self.runner = FakeRunner(self.kv)
        self.news: SimpleQueue[EngineNews] = SimpleQueue()
        self.inbox = Inbox()
        config = make_config(max_model_len=256)
        self.scheduler = DecodeScheduler(
            config,
            self.pool,
            PrefixCache(self.pool),
            FakeReceiver(self.kv),
            "127.0.0.1:7",
            WorkerIdentity("d0", "e0"),
            self.inbox.put,
        )
        self.engine = EngineThread(
            self.scheduler, self.runner, self.inbox, self.news.put, check_when_idle=True, name="engine-test"
        )

    def outputs_until(self, done: Callable[[LegOutput], bool]) -> list[LegOutput]:
        seen: list[LegOutput] = []
        while True:
            for news in self.news.get(timeout=BOUND_S).by_owner.values():
                seen += news.outputs
            if seen and done(seen[-1]):
                return seen


@pytest.fixture
def harness() -> Iterator[Harness]:
    h = Harness()
    yield h
    assert h.engine.stop(BOUND_S)


def ended(output: LegOutput) -> bool:
    return output.leg_ended


def test_a_sequence_runs_to_its_end_with_one_piece_of_news_a_step(harness):
    spec = make_spec("a", [1, 2, 3], max_tokens=20)
    harness.engine.start()
    harness.inbox.put(reserve(spec, prefill_here=True))
    outputs = harness.outputs_until(ended)
    expected, reason = reference_output(spec.token_ids, 3, spec.sampling, 256)
    assert [t for o in outputs for t in o.token_ids] == expected
    assert all(len(o.token_ids) == 1 for o in outputs)
    assert outputs[-1].finish_reason == reason


def test_an_abort_is_heard_before_the_next_step_begins(harness):
    entered, go_on = threading.Event(), threading.Event()
    execute = harness.runner.execute

    def held(scheduled):
        entered.set()
        assert go_on.wait(BOUND_S)
        return execute(scheduled)

    harness.runner.execute = held
    harness.engine.start()
    harness.inbox.put(reserve(make_spec("a", [1, 2, 3], max_tokens=200), prefill_here=True))
    assert entered.wait(BOUND_S)
    harness.inbox.put(AbortCommand(1, "a"))
    go_on.set()
    outputs = harness.outputs_until(ended)
    assert outputs[-1].finish_reason == FinishReason.ABORT
    assert len(harness.runner.steps) == 1
    assert harness.pool.num_free == 64


def test_one_failing_step_fails_its_sequences_and_the_engine_stays_well(harness):
    harness.runner.fail_next = RuntimeError("kernel")
    harness.engine.start()
    harness.inbox.put(reserve(make_spec("a", [1]), prefill_here=True))
    error = harness.outputs_until(ended)[-1].error
    assert error is not None
    assert error.kind == ErrorKind.WORKER_FAILED
    harness.inbox.put(reserve(make_spec("b", [1], max_tokens=2), prefill_here=True))
    assert harness.outputs_until(ended)[-1].error is None
    assert harness.engine.failure is None


def test_two_failing_steps_in_a_row_make_the_engine_unhealthy_and_end_all(harness):
    def broken(_):
        raise RuntimeError("kernel")

    harness.runner.execute = broken
    harness.engine.start()
    for name in ("a", "b"):
        harness.inbox.put(reserve(make_spec(name, [1]), prefill_here=True))
        assert harness.outputs_until(ended)[-1].error is not None
    assert harness.engine.stop(BOUND_S)
    assert harness.engine.failure is not None
    assert "2 engine steps in a row failed" in harness.engine.failure


def test_a_bug_in_the_scheduler_ends_the_thread_and_is_told(harness):
    def broken(now):
        raise ZeroDivisionError("bug")

    harness.scheduler.schedule = broken
    harness.engine.start()
    harness.inbox.wake()
    harness.engine._thread.join(BOUND_S)
    assert not harness.engine.is_alive
    assert harness.engine.failure == "the engine broke: ZeroDivisionError: bug"


def test_a_hanging_step_stops_the_beats_and_shows_what_it_is(harness):
    entered, go_on = threading.Event(), threading.Event()
    execute = harness.runner.execute

    def hanging(scheduled):
        entered.set()
        assert go_on.wait(BOUND_S)
        return execute(scheduled)

    harness.runner.execute = hanging
    harness.engine.start()
    harness.inbox.put(reserve(make_spec("a", [1, 2, 3], max_tokens=1), prefill_here=True))
    assert entered.wait(BOUND_S)
    stuck = harness.engine.pulse
    assert stuck.step == StepShape(1, 3, 0)
    assert harness.engine.pulse == stuck
    go_on.set()
    harness.outputs_until(ended)
    assert becomes_true(lambda: harness.engine.pulse.step is None)
    assert harness.engine.pulse.beats > stuck.beats


def test_an_idle_engine_beats(harness):
    harness.engine.start()
    first = harness.engine.pulse.beats
    assert becomes_true(lambda: harness.engine.pulse.beats > first + 2)


def idle_engine(harness: Harness) -> EngineThread:
    return EngineThread(
        harness.scheduler,
        harness.runner,
        harness.inbox,
        harness.news.put,
        check_when_idle=True,
        canary_interval_s=0.01,
    )


def test_an_idle_engine_computes_a_canary_that_is_nobodys(harness):
    engine = idle_engine(harness)
    engine.start()
    assert becomes_true(lambda: len(harness.runner.steps) >= 3)
    harness.inbox.put(reserve(make_spec("a", [1, 2, 3], max_tokens=2), prefill_here=True))
    assert harness.outputs_until(ended)[-1].error is None
    assert engine.stop(BOUND_S)
    assert harness.pool.num_free == 64
    assert engine.failure is None


def test_a_broken_device_is_found_out_by_the_canary_alone(harness):
    def broken(_):
        raise RuntimeError("the device is gone")

    harness.runner.execute = broken
    engine = idle_engine(harness)
    engine.start()
    assert becomes_true(lambda: engine.failure is not None)
    assert "the device is gone" in (engine.failure or "")


def test_stop_ends_all_sequences_and_may_be_called_at_any_time(harness):
    assert harness.engine.stop(BOUND_S)  # not started yet
    harness.engine.start()
    for name in ("a", "b"):
        harness.inbox.put(reserve(make_spec(name, [1, 2])))
    while harness.news.get(timeout=BOUND_S).load.num_running != 2:
        pass
    assert harness.engine.stop(BOUND_S)
    assert harness.engine.stop(BOUND_S)
    assert harness.engine.num_open == 0
    kinds = [o.error.kind for o in harness.outputs_until(ended) if o.error is not None]
    assert set(kinds) == {ErrorKind.DRAINING}


def test_the_inbox_keeps_order_and_says_when_it_is_full():
    inbox = Inbox(capacity=2)
    assert inbox.drain(0.0) == []
    inbox.put(AbortCommand(1, "a"))
    assert not inbox.is_full
    inbox.put(AbortCommand(1, "b"))
    assert inbox.is_full
    inbox.wake()
    inbox.put(AbortCommand(1, "c"))  # never refused: who may wait asks first
    assert inbox.drain(0.0) == [AbortCommand(1, name) for name in "abc"]
    with pytest.raises(Empty):
        inbox._queue.get_nowait()
