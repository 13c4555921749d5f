"""Run the load: start every request when it is due, write down what happens, let nothing but the plan set the pace."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from loadtest.client.target import Send, Target
from loadtest.errors import BenchError
from loadtest.gauges import GaugeSampler, GaugeSeries
from loadtest.monitor import ClientLoad, watch_client
from loadtest.plan import Planned, StreamPlan
from loadtest.prompts import PromptMaker
from loadtest.record import Failure, RequestRecord
from loadtest.streams import StreamSpec
from loadtest.timer import Alarms

_START_DELAY_S: Final = 0.05
_SPARE_FILES: Final = 64


@dataclass(frozen=True, slots=True)
class RunLimits:
    """requests: in all, each turn counted. duration_s: no request starts later. timeout_s: of one request."""

    requests: int | None = None
    duration_s: float | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise BenchError(f"--requests must be at least 1, not {self.requests}")
        if self.duration_s is not None and not self.duration_s > 0:
            raise BenchError(f"--duration must be above 0 s, not {self.duration_s:g}")
        if not self.timeout_s > 0:
            raise BenchError(f"--timeout must be above 0 s, not {self.timeout_s:g}")


@dataclass(slots=True)
class RunResult:
    """origin_s: perf_counter at the start of the plan; started_at: the same as Unix time.

    stopped: why the run ended before its plan did, "" if it did not. clipped: prompts cut to fit the model.
    """

    origin_s: float
    started_at: float
    records: list[RequestRecord] = field(default_factory=list)
    client: ClientLoad = field(default_factory=ClientLoad)
    gauges: GaugeSeries = field(default_factory=GaugeSeries)
    stopped: str = ""
    clipped: int = 0


class LoadRun:
    """One run, made inside the event loop. `running` and `result.records` may be read while it goes on."""

    def __init__(
        self,
        target: Target,
        streams: Sequence[StreamSpec],
        maker: PromptMaker,
        limits: RunLimits,
        *,
        seed: int = 0,
        gauges: GaugeSampler | None = None,
        on_done: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        if limits.requests is None and limits.duration_s is None and not all(s.workload.is_finite for s in streams):
            raise BenchError("no end given: --requests N or --duration SECONDS")
        self._limits = limits
        self._gauges = gauges
        self._on_done = on_done
        self._plans = [StreamPlan(s, maker, target, seed=seed, duration_s=limits.duration_s) for s in streams]
        self._started = 0
        self._open_plans = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup
        self._alarms: Alarms
        # Done when no arrival is to come; carries what went wrong in a callback.
        self._arrivals: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running: set[RequestRecord] = set()
        self.result = RunResult(0.0, 0.0)

    async def run(self) -> RunResult:
        """Raises BenchError where the plan can't be carried out; the server's faults are in the records instead."""
        _raise_file_limit()
        for plan in self._plans:
            plan.fill()
        self._alarms = Alarms()
        try:
            with _no_gc():
                self.result.origin_s = time.perf_counter() + _START_DELAY_S
                self.result.started_at = time.time() + _START_DELAY_S
                async with _background(watch_client(self.result.client), *self._sampling()):
                    await self._run_sessions()
        finally:
            self._alarms.close()
        if self._gauges is not None:
            self.result.gauges = self._gauges.series
        return self.result

    def stop(self, reason: str) -> None:
        """End now: no more requests, and those running are given up (counted as cancelled)."""
        if self.result.stopped:
            return
        self.result.stopped = reason
        self._end_arrivals()
        for task in self._tasks:
            task.cancel()

    async def _run_sessions(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                for plan in self._plans:
                    self._start_plan(plan)
                if not self._open_plans:
                    self._end_arrivals()
                # Keeps the group open between two arrivals.
                self._group.create_task(_wait(self._arrivals))
        except BaseExceptionGroup as group:
            # One cause is enough for the one line that the user gets.
            raise group.exceptions[0] from None

    def _start_plan(self, plan: StreamPlan) -> None:
        if plan.spec.arrival.is_open:
            self._open_plans += 1
            self._schedule(plan)
            return
        for _ in range(plan.spec.arrival.concurrency):
            self._spawn(self._user(plan))

    def _schedule(self, plan: StreamPlan) -> None:
        due_s = None if self._arrivals.done() else plan.next_due_s()
        if due_s is None:
            self._open_plans -= 1
            if not self._open_plans:
                self._end_arrivals()
            return
        self._alarms.at(self.result.origin_s + due_s, functools.partial(self._launch, plan))

    def _launch(self, plan: StreamPlan) -> None:
        """An open-loop session is due."""
        if self._arrivals.done():
            return
        with self._guarded():
            planned = plan.take()
            if planned is not None and (index := self._claim()) is not None:
                self._spawn(self._session(plan, planned, index, self.result.origin_s + planned.due_s))
            self._schedule(plan)
        # Queued behind the request above, so that it leaves first.
        asyncio.get_running_loop().call_soon(self._refill, plan)

    def _refill(self, plan: StreamPlan) -> None:
        with self._guarded():
            plan.prepare_one()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """For callbacks of the event loop, where nobody would see an exception: it ends the run instead."""
        try:
            yield
        except Exception as e:
            if not self._arrivals.done():
                self._arrivals.set_exception(e)

    def _end_arrivals(self) -> None:
        if not self._arrivals.done():
            self._arrivals.set_result(None)

    def _spawn(self, session: Coroutine[None, None, None]) -> None:
        task = self._group.create_task(session)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _user(self, plan: StreamPlan) -> None:
        """A closed-loop user: the next session starts when the last has ended."""
        await self._alarms.wait_until(self.result.origin_s)
        while self._in_time(time.perf_counter()) and (planned := plan.take()) is not None:
            if (index := self._claim()) is None:
                return
            await self._session(plan, planned, index, time.perf_counter())

    async def _session(self, plan: StreamPlan, planned: Planned, index: int, intended_s: float) -> None:
        """The turns of one session, one after the other; a failed turn ends it."""
        session, conversation, send = planned.session, planned.conversation, planned.first_send
        last = len(session.turns) - 1
        for turn, spec in enumerate(session.turns):
            record = RequestRecord(
                index=index,
                stream=self._plans.index(plan),
                turn=turn,
                intended_s=intended_s,
                requested_tokens=spec.max_tokens,
                keep_answer=turn < last,
            )
            self.result.clipped += conversation.clipped
            await self._request(send, record)
            if not record.ok or turn == last:
                return
            conversation.answered(turn, record)
            intended_s = record.end_s + session.turns[turn + 1].think_s
            if not self._in_time(intended_s) or (claimed := self._claim()) is None:
                return
            index = claimed
            send = plan.prepare_turn(session, conversation, turn + 1)
            await self._alarms.wait_until(intended_s)

    async def _request(self, send: Send, record: RequestRecord) -> None:
        self.running.add(record)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await send(record)
        except TimeoutError:
            record.fail(Failure.TIMEOUT, f"no end after {self._limits.timeout_s:g} s")
        except asyncio.CancelledError:
            record.fail(Failure.CANCELLED, self.result.stopped)
            raise
        finally:
            record.close(time.perf_counter())
            self.running.discard(record)
            self.result.records.append(record)
            if self._on_done is not None:
                self._on_done(record)

    def _claim(self) -> int | None:
        """The number of the request that is about to start; None once the plan's number is reached."""
        if self._started == self._limits.requests:
            return None
        self._started += 1
        if self._started == self._limits.requests:
            self._end_arrivals()
        return self._started - 1

    def _in_time(self, when_s: float) -> bool:
        return self._limits.duration_s is None or when_s - self.result.origin_s < self._limits.duration_s

    def _sampling(self) -> Iterator[Awaitable[None]]:
        if self._gauges is not None:
            yield self._gauges.run()


async def _wait(awaitable: Awaitable[None]) -> None:
    await awaitable


@contextlib.asynccontextmanager
async def _background(*work: Awaitable[None]) -> AsyncIterator[None]:
    """Runs `work` beside the body and cancels it at its end."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """No collection during the run: records hold no cycles, and a full pass over a million of them takes a second."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _raise_file_limit() -> None:
    """An open loop needs a socket for each request in flight, however many those become."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
