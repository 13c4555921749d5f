"""The one thread that owns a scheduler, its block pool and a runner: engine state is touched there and nowhere else.

    any thread ── put ──► Inbox ──► handle … expire … schedule ──► runner ──► complete ──► on_news (once a round)
                                    └─────────────────── one round ──────────────────┘

An abort is in the inbox before the next step begins, so its blocks are free within one step. The loop's heartbeat is
its `pulse`. An engine that has had nothing to do for a while computes a token of nobody's, to see whether it still can.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from common.engine.batch import ScheduledSequence
from common.engine.messages import Command, EngineNews, StepShape, TransferEvent
from common.engine.runner import Runner, StepResult
from common.errors import BatonError, ErrorKind
from common.telemetry import get_logger

IDLE_WAIT_S: Final = 0.25
STOP_POLL_S: Final = 0.02
MAX_CONSECUTIVE_FAILURES: Final = 2

_log = get_logger(__name__)


class Scheduler(Protocol):
    """What the thread drives; see common/engine/scheduler.py for the meaning of each call."""

    @property
    def num_open(self) -> int: ...

    @property
    def earliest_deadline(self) -> float: ...

    def handle(self, item: Command | TransferEvent, now: float) -> None: ...

    def expire(self, now: float) -> None: ...

    def schedule(self, now: float) -> list[ScheduledSequence]: ...

    @property
    def step_shape(self) -> StepShape | None: ...

    def begin_canary(self) -> list[ScheduledSequence]: ...

    def end_canary(self) -> None: ...

    def complete(self, result: StepResult, now: float) -> None: ...

    def fail_step(self, error: BatonError, now: float) -> None: ...

    def stop(self, error: BatonError, now: float) -> None: ...

    def take_news(self, step_s: float | None) -> EngineNews | None: ...

    def check_integrity(self) -> None: ...


class Inbox:
    """Thread-safe FIFO of what an engine must hear. Never refuses; who can wait asks `is_full` first, and waits."""

    def __init__(self, capacity: int = 4096) -> None:
        self._queue: SimpleQueue[Command | TransferEvent | None] = SimpleQueue()
        self._capacity = capacity

    @property
    def is_full(self) -> bool:
        return self._queue.qsize() >= self._capacity

    def put(self, item: Command | TransferEvent) -> None:
        self._queue.put(item)

    def wake(self) -> None:
        """Let a waiting `drain` return."""
        self._queue.put(None)

    def drain(self, timeout_s: float) -> list[Command | TransferEvent]:
        """All that is there; waits up to timeout_s where nothing is."""
        items: list[Command | TransferEvent] = []
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            while True:
                if item is not None:
                    items.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return items


@dataclass(frozen=True, slots=True)
class Pulse:
    """beats: how often the loop has beaten: whenever a round or a step began, or a step ended. step: what it computes
    now; None between steps."""

    beats: int
    step: StepShape | None


CANARY_SHAPE: Final = StepShape(num_sequences=1, num_prefill_tokens=1, num_decode_tokens=0)


class EngineThread:
    """on_news runs in the engine's thread: hand over and return. It must not raise.

    clock: monotonic seconds, the one of all deadlines. check_when_idle: verify all counts whenever there is no work.
    canary_interval_s: an engine without work computes one token so often, to see whether it can; 0: never.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        on_news: Callable[[EngineNews], None],
        *,
        name: str = "engine",
        clock: Callable[[], float] = time.monotonic,
        check_when_idle: bool = False,
        canary_interval_s: float = 0.0,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._on_news = on_news
        self._clock = clock
        self._check_when_idle = check_when_idle
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._pulse = Pulse(0, None)
        self._canary_interval_s = canary_interval_s or inf
        self._canary_at = inf
        self._failure: str | None = None
        self._consecutive_failures = 0
        self._has_work = False
        self._stop_by: float | None = None

    @property
    def inbox(self) -> Inbox:
        return self._inbox

    @property
    def failure(self) -> str | None:
        """Why the engine is unhealthy, as one line; None while it is well. Final: it takes no more work."""
        return self._failure

    @property
    def pulse(self) -> Pulse:
        """A thread that hangs can't hide it: its beats stay what they are."""
        return self._pulse

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Sequences that have not ended. Read from other threads: a moment old."""
        return self._scheduler.num_open

    def start(self) -> None:
        self._canary_at = self._clock() + self._canary_interval_s
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Abort all sequences, wait for their transfers to let go of the blocks, and join. False: not in timeout_s.

        Blocks the caller. May be called twice, and before start.
        """
        if self._thread.ident is None:
            return True
        self._stop_by = self._clock() + timeout_s
        self._inbox.wake()
        # A step can't be interrupted, so the join gets a little longer than the sequences.
        self._thread.join(timeout_s + IDLE_WAIT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._stop_by is None and self._failure is None:
                self._round()
            if self._failure is None:
                self._shut_down(BatonError(ErrorKind.DRAINING, "this worker is stopping: send the request to another"))
        except Exception as error:
            _log.exception("engine_broken")
            self._failure = f"the engine broke: {type(error).__name__}: {error}"

    def _beat(self, step: StepShape | None = None) -> None:
        self._pulse = Pulse(self._pulse.beats + 1, step)

    def _round(self) -> None:
        self._beat()
        timeout_s = 0.0 if self._has_work else self._idle_wait_s()
        for item in self._inbox.drain(timeout_s):
            self._scheduler.handle(item, self._clock())
        self._beat()
        now = self._clock()
        self._scheduler.expire(now)
        scheduled = self._scheduler.schedule(now)
        self._has_work = bool(scheduled)
        step_s = self._execute(scheduled) if scheduled else None
        if not scheduled:
            self._when_idle(now)
        self._tell(step_s)

    def _when_idle(self, now: float) -> None:
        if now >= self._canary_at:
            self._run_canary()
        if self._check_when_idle:
            self._scheduler.check_integrity()

    def _run_canary(self) -> None:
        """A token of nobody's. One that fails is followed by another at once: two in a row mean that the engine is
        broken, and nobody's request was needed to find out."""
        scheduled = self._scheduler.begin_canary()
        self._canary_at = self._clock() + self._canary_interval_s
        if not scheduled:
            return
        self._beat(CANARY_SHAPE)
        try:
            extras = self._runner.execute(scheduled).extras
            if extras and (error := extras[0].error) is not None:
                raise error
        except Exception as error:
            self._on_step_failure(error)
            self._canary_at = self._clock()
        else:
            self._consecutive_failures = 0
        self._scheduler.end_canary()
        self._beat()

    def _idle_wait_s(self) -> float:
        until = min(self._scheduler.earliest_deadline, self._canary_at) - self._clock()
        return max(0.0, min(IDLE_WAIT_S, until))

    def _execute(self, scheduled: Sequence[ScheduledSequence]) -> float:
        """Run one step; returns its seconds."""
        started = self._clock()
        self._canary_at = started + self._canary_interval_s
        self._beat(self._scheduler.step_shape)
        try:
            result = self._runner.execute(scheduled)
        except Exception as error:
            self._on_step_failure(error)
        else:
            self._consecutive_failures = 0
            self._scheduler.complete(result, self._clock())
        self._beat()
        return self._clock() - started

    def _on_step_failure(self, error: Exception) -> None:
        _log.exception("step_failed")
        self._consecutive_failures += 1
        what = error.message if isinstance(error, BatonError) else type(error).__name__
        cause = BatonError(ErrorKind.WORKER_FAILED, f"an engine step failed: {what}")
        self._scheduler.fail_step(cause, self._clock())
        if self._consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            self._scheduler.stop(cause, self._clock())
            self._failure = f"{self._consecutive_failures} engine steps in a row failed, the last with {error!r}"

    def _shut_down(self, error: BatonError) -> None:
        """End everything; then only transfers are waited for, until the deadline."""
        self._scheduler.stop(error, self._clock())
        self._tell(None)
        while self._scheduler.num_open and self._clock() < (self._stop_by or -inf):
            self._beat()
            for item in self._inbox.drain(STOP_POLL_S):
                self._scheduler.handle(item, self._clock())
            self._tell(None)

    def _tell(self, step_s: float | None) -> None:
        news = self._scheduler.take_news(step_s)
        if news is not None:
            self._on_news(news)
