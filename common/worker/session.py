"""The worker's side of WorkerService: one multiplexed session a router, its commands in, its news out.

    router ── SessionRequest ──► reader ──► engine inbox
    router ◄─ SessionResponse ── writer ◄── bounded queue ◄── SessionHub.on_news (once an engine round)

When a session ends, however it ends, the engine hears of it and aborts all that came by it. All of this belongs to the
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Final

import grpc

from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from common.engine.engine_thread import Inbox
from common.engine.messages import (
    AbortOwnerCommand,
    Command,
    EndedLeg,
    EngineNews,
    LegOutput,
    OwnerNews,
    PrefillCommand,
    ReserveCommand,
)
from common.errors import BatonError, ErrorKind, invalid
from common.rpc.convert import error_to_status
from common.rpc.worker_convert import load_to_proto
from common.rpc.worker_messages import LoadReport
from common.telemetry import get_logger
from common.worker import convert
from common.worker.info import BEAT_S, WorkerInfo
from common.worker.leg_reports import log_failed_leg

HELLO_TIMEOUT_S: Final = 10.0
MAX_SESSIONS: Final = 256
# Frames that a router has not read; one a step, so at 10 ms a step some 20 s.
MAX_QUEUED_FRAMES: Final = 2048
INBOX_POLL_S: Final = 0.005
CLOSE_TIMEOUT_S: Final = 1.0

_log = get_logger(__name__)
_Context = grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


class _Session:
    """Frames on their way to one router."""

    def __init__(self, owner: int, router_id: str) -> None:
        self.owner = owner
        self.router_id = router_id
        self.handler: asyncio.Task[Any] | None = asyncio.current_task()
        # Figures of the last frame: a change of these is news to a router that got none of its own.
        self.told_load: tuple[int, int] | None = None
        self.told_at = 0.0
        # Set once: why no more frames are taken. The writer ends when the queue is empty, or at once for a failure.
        self.closing = False
        self.failure: BatonError | None = None
        self.ended = asyncio.Event()
        self._queue: deque[worker_pb2.SessionResponse] = deque()
        self._filled = asyncio.Event()

    def send(self, frames: list[worker_pb2.SessionResponse]) -> None:
        if self.closing:
            return
        self._queue.extend(frames)
        self._filled.set()
        if len(self._queue) > MAX_QUEUED_FRAMES:
            self.fail(BatonError(ErrorKind.OVERLOADED, f"the router left {MAX_QUEUED_FRAMES} frames unread"))

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def finish(self) -> None:
        """Write what is queued, then end."""
        self.closing = True
        self._filled.set()

    def fail(self, error: BatonError) -> None:
        """End now, whatever is queued."""
        if self.failure is None:
            self.closing, self.failure = True, error
            self._queue.clear()
            self.ended.set()

    async def write(self, context: _Context) -> None:
        """Returns when finished and all is written."""
        while True:
            while self._queue:
                await context.write(self._queue.popleft())
            if self.closing:
                return
            self._filled.clear()
            await self._filled.wait()


class SessionHub(worker_pb2_grpc.WorkerServiceServicer):
    """Serves WorkerService, and hands the engine's news to the sessions they are for.

    max_timeout_s: bound on the deadlines that routers ask for. on_drain: told that the worker shall drain, and with
    which grace in seconds, if one was named; answers how long that may take. `beat` must be called every BEAT_S.
    """

    def __init__(
        self, info: WorkerInfo, inbox: Inbox, max_timeout_s: float, on_drain: Callable[[float | None], float]
    ) -> None:
        self._on_drain = on_drain
        self._info = info
        self._inbox = inbox
        self._max_timeout_s = max_timeout_s
        self._sessions: dict[int, _Session] = {}
        self._owners = count(1)
        self._load = LoadReport(num_free_blocks=info.num_blocks, num_blocks=info.num_blocks)
        self._beats = 0
        self._stalled = False
        self._draining = False
        self._closing = False

    # From the engine, by way of the event loop

    def on_news(self, news: EngineNews) -> None:
        """Exactly one StepOutput to each session that has outputs; the others hear when the load changed."""
        self._load = news.load
        load = self._load_frame()
        for session in list(self._sessions.values()):
            own = news.by_owner.get(session.owner)
            if own is None and session.told_load == _load_key(news.load):
                continue
            try:
                self._tell(session, own, load)
            except Exception:
                # Its router would wait for news that never comes; without a session it goes elsewhere.
                _log.exception("news can't be told", router_id=session.router_id)
                session.fail(BatonError(ErrorKind.INTERNAL, "this worker failed to convert its news"))

    def _tell(self, session: _Session, news: OwnerNews | None, load: worker_pb2.LoadReport) -> None:
        session.told_load = _load_key(self._load)
        session.told_at = time.monotonic()
        session.send(convert.news_frames(news, load))

    def beat(self, beats: int, *, stalled: bool) -> None:
        """A load report to every session that heard nothing for BEAT_S, and to all when the engine stalls or recovers.
        beats: of the engine's loop."""
        changed, self._stalled, self._beats = stalled != self._stalled, stalled, beats
        long_ago = time.monotonic() - BEAT_S
        self._tell_load(lambda session: changed or (session.told_at <= long_ago and session.is_idle))

    def drain(self) -> None:
        """Tell all routers, before anything else, that no new sequences are taken."""
        self._draining = True
        self._tell_load(lambda _: True)

    def _tell_load(self, to: Callable[[_Session], bool]) -> None:
        load = self._load_frame()
        for session in list(self._sessions.values()):
            if to(session):
                self._tell(session, None, load)

    def _load_frame(self) -> worker_pb2.LoadReport:
        state = replace(self._load, engine_beats=self._beats, engine_stalled=self._stalled, draining=self._draining)
        return load_to_proto(state)

    async def close(self) -> None:
        """End all sessions once their frames are written, and refuse new ones. Waits up to CLOSE_TIMEOUT_S."""
        self._closing = True
        sessions = list(self._sessions.values())
        for session in sessions:
            session.finish()
        handlers = {s.handler for s in sessions if s.handler is not None}
        if handlers:
            _, late = await asyncio.wait(handlers, timeout=CLOSE_TIMEOUT_S)
            for handler in late:
                handler.cancel()

    # WorkerService

    async def GetInfo(  # noqa: N802
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetInfoResponse:
        return convert.info_to_proto(self._info)

    async def Drain(  # noqa: N802
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainResponse:
        try:
            if request.epoch:
                self._check_epoch(request.epoch)
        except BatonError as error:
            await context.abort(*error_to_status(error))
        timeout_s = self._on_drain(request.grace_ms / 1e3 if request.HasField("grace_ms") else None)
        return worker_pb2.DrainResponse(timeout_ms=round(timeout_s * 1e3))

    # grpc.aio also takes a coroutine that reads and writes by the context; the stubs know generators only.
    async def Session(self, request_iterator: object, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """See worker.proto. Errors leave as a status with details."""
        try:
            hello = await self._greet(context)
        except BatonError as error:
            await context.abort(*error_to_status(error))
        session = _Session(next(self._owners), hello.router_id)
        self._sessions[session.owner] = session
        _log.info("router connected", router_id=session.router_id)
        try:
            session.send([convert.welcome_frame(self._info)])
            self._tell(session, None, self._load_frame())
            await self._serve(session, context)
        finally:
            del self._sessions[session.owner]
            self._inbox.put(AbortOwnerCommand(session.owner))
            _log.info("router gone", router_id=session.router_id, reason=str(session.failure or "session ended"))
        if session.failure is not None:
            # The status travels behind what was written: a router that reads nothing never takes it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await context.abort(*error_to_status(session.failure))

    async def _greet(self, context: _Context) -> worker_pb2.Hello:
        """The router's hello, checked. Raises BatonError."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frame = await context.read()
        except TimeoutError:
            raise invalid(f"no hello within {HELLO_TIMEOUT_S:g} s of the session's start") from None
        if not isinstance(frame, worker_pb2.SessionRequest) or not frame.HasField("hello"):
            raise invalid("a session's first frame must be a hello")
        self._check_epoch(frame.hello.epoch)
        me = self._info
        if self._closing:
            raise BatonError(ErrorKind.DRAINING, f"worker {me.worker_id} is stopping")
        if len(self._sessions) >= MAX_SESSIONS:
            raise BatonError(ErrorKind.OVERLOADED, f"worker {me.worker_id} has {MAX_SESSIONS} sessions already")
        return frame.hello

    def _check_epoch(self, epoch: str) -> None:
        """Raises STALE_EPOCH."""
        me = self._info
        if epoch != me.epoch:
            message = f"worker {me.worker_id} has epoch {me.epoch!r}, not {epoch!r}: it was restarted"
            raise BatonError(ErrorKind.STALE_EPOCH, message)

    async def _serve(self, session: _Session, context: _Context) -> None:
        """Until either side ends the session, or it fails."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._read(session, context)),
            asyncio.create_task(session.write(context)),
            asyncio.create_task(session.ended.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    _log.warning("router session broken", router_id=session.router_id, error=repr(result))

    async def _read(self, session: _Session, context: _Context) -> None:
        """Commands to the engine, until the router ends its side. A full inbox stops the reading, not the engine."""
        while True:
            frame = await context.read()
            if not isinstance(frame, worker_pb2.SessionRequest):
                return
            command = convert.command_from_proto(frame, session.owner, time.monotonic(), self._max_timeout_s)
            if command is None:
                session.fail(invalid("a frame without a command this worker knows"))
                return
            if (refusal := self._refusal(command)) is not None:
                self._tell(session, OwnerNews(outputs=[refusal]), self._load_frame())
                continue
            while self._inbox.is_full:  # noqa: ASYNC110 (another thread empties it)
                await asyncio.sleep(INBOX_POLL_S)
            self._inbox.put(command)

    def _refusal(self, command: Command) -> LegOutput | None:
        """A command for the other phase must be answered, or its request would wait for its deadline."""
        if isinstance(command, PrefillCommand if self._info.role == "decode" else ReserveCommand):
            error = invalid(f"worker {self._info.worker_id} is a {self._info.role} worker: not its command")
            log_failed_leg(EndedLeg.refused(command.spec, error, time.monotonic()), error)
            return LegOutput(command.spec.transfer_id, error=error, leg_ended=True)
        return None


def _load_key(load: LoadReport) -> tuple[int, int]:
    return load.num_running, load.num_waiting
