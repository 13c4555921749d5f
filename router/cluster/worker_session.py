"""The router's one session with one worker: dial, hello, commands out, frames in, and what of ours runs there.

    DIALLING ──Welcome──► READY ◄── it is heard again ── SILENT ◄── nothing heard, or its engine stalled ── READY
       ▲                    └──── end of stream, however ──┴──► DIALLING (after a pause) … CLOSED

Whatever runs on a worker hears of a loss as soon as it falls silent: its requests go on elsewhere. The session stays:
where it was only a pause, the worker gets work again.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from math import inf
from typing import Any, Final

import grpc

from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from common.errors import BatonError, ErrorKind
from common.registry import WorkerRecord
from common.rpc.worker_convert import load_from_proto, logprobs_from_proto, target_from_proto
from common.rpc.worker_messages import LoadReport, PullSource, SequenceSpec, TransferTarget
from common.silence import SilenceTimer
from common.telemetry import get_logger
from router.cluster import convert
from router.cluster.messages import LegListener
from router.cluster.subscriptions import SubscriptionTable
from router.policy.placement_cost import WorkerLoad

WELCOME_TIMEOUT_S: Final = 5.0
FIRST_BACKOFF_S: Final = 0.1
LAST_BACKOFF_S: Final = 2.0
# Older figures are not believed: an idle worker is not shunned for a load it had once.
REPORT_LIFETIME_S: Final = 5.0
# Commands that a worker has not read. More of them mean that it is stuck: the session ends.
MAX_OUTBOX_FRAMES: Final = 8192
# Silence is judged so often.
LOOK_S: Final = 0.1
DEFAULT_SILENCE_S: Final = 0.8
# Heartbeats that may be missed, whatever silence is set.
MIN_MISSED_BEATS: Final = 2
# A worker that answers no ping for this long is gone: silence alone may be a pause.
CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_log = get_logger(__name__)
_Call = grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]


class SessionState(StrEnum):
    DIALLING = "dialling"
    READY = "ready"
    SILENT = "silent"
    CLOSED = "closed"


class SessionEvent(StrEnum):
    CONNECTED = "connected"
    SILENT = "silent"
    LOST = "lost"


class WorkerSession:
    """All methods belong to the event loop. `run` is a task of the fleet; the rest is synchronous.

    on_change: called whenever the session becomes ready, or able to take work, or stops being so. clock: monotonic
    seconds. silence_s: after which a worker that promised heartbeats counts as lost.
    """

    def __init__(
        self,
        record: WorkerRecord,
        router_id: str,
        on_change: Callable[[], None],
        clock: Callable[[], float],
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> None:
        self.record = record
        self.num_late_frames = 0
        self.num_events = dict.fromkeys(SessionEvent, 0)
        self._router_id = router_id
        self._on_change = on_change
        self._clock = clock
        self._state = SessionState.DIALLING
        self._subscriptions = SubscriptionTable()
        self._outbox: deque[worker_pb2.SessionRequest] = deque()
        self._outbox_filled = asyncio.Event()
        self._overflow = asyncio.Event()
        self._report: LoadReport | None = None
        self._reported_at = 0.0
        self._silence_s = silence_s
        self._allowed_silence_s = inf
        self._silence = SilenceTimer(LOOK_S, clock())
        self._draining = False

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def ready(self) -> bool:
        return self._state is SessionState.READY

    @property
    def accepting(self) -> bool:
        """Whether new work may be sent there."""
        return self.ready and not self._draining and not self.record.draining

    @property
    def report(self) -> LoadReport | None:
        """The latest of this incarnation, however old."""
        return self._report

    @property
    def num_subscriptions(self) -> int:
        return len(self._subscriptions)

    def load(self, num_cached_tokens: int = 0, num_host_cached_tokens: int = 0) -> WorkerLoad:
        """What placement may assume now: the latest report, plus what it can't know of yet. Rates don't expire."""
        fresh = self._report is not None and self._clock() - self._reported_at < REPORT_LIFETIME_S
        report = self._report if fresh else None
        free = report.num_free_blocks if report else self.record.num_blocks
        return WorkerLoad(
            worker_id=self.record.worker_id,
            usable=self.accepting,
            num_blocks=self.record.num_blocks,
            num_free_blocks=max(0, free - self._subscriptions.unconfirmed_blocks),
            num_running=max(report.num_running + report.num_waiting if report else 0, len(self._subscriptions)),
            queued_prefill_tokens=max(
                report.queued_prefill_tokens if report else 0, self._subscriptions.unanswered_prefill_tokens
            ),
            num_cached_tokens=num_cached_tokens,
            num_host_cached_tokens=num_host_cached_tokens,
            rates=self._report.step_rates if self._report else None,
        )

    def subscribe(self, transfer_id: str, listener: LegListener, *, prefill_tokens: int = 0, blocks: int = 0) -> None:
        """From now on `listener` hears of transfer_id, and its expected load counts here, until unsubscribe, the
        leg's last frame, or the session's loss. Raises LEASE_LOST where the session is not ready.
        """
        if not self.ready:
            raise self._lost_error()
        self._subscriptions.add(transfer_id, listener, prefill_tokens=prefill_tokens, blocks=blocks)

    def unsubscribe(self, transfer_id: str) -> None:
        """Forget transfer_id; a no-op where it is forgotten already."""
        self._subscriptions.remove(transfer_id)

    def send_reserve(self, spec: SequenceSpec, *, prefill_here: bool) -> None:
        self._send(convert.reserve_frame(spec, self._clock(), prefill_here=prefill_here))

    def send_prefill(self, spec: SequenceSpec, target: TransferTarget, pull_sources: Sequence[PullSource] = ()) -> None:
        self._send(convert.prefill_frame(spec, target, self._clock(), pull_sources))

    def send_abort(self, transfer_id: str) -> None:
        self._send(convert.abort_frame(transfer_id))

    def _send(self, frame: worker_pb2.SessionRequest) -> None:
        # Without a session there is nobody who would have to know: its end aborts all that came by it.
        if not self.ready:
            return
        self._outbox.append(frame)
        self._outbox_filled.set()
        if len(self._outbox) > MAX_OUTBOX_FRAMES:
            self._overflow.set()

    def close(self) -> None:
        """For good: subscribers hear of a loss. Whoever owns the task of `run` cancels it afterwards."""
        self._lose()
        self._state = SessionState.CLOSED

    # -- life of the connection

    async def run(self) -> None:
        """Dial, serve, and dial again until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                was_ready = await self._serve_once()
                backoff_s = FIRST_BACKOFF_S if was_ready else min(backoff_s * 2, LAST_BACKOFF_S)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))
        finally:
            self.close()

    async def _serve_once(self) -> bool:
        """One connection from dial to end. Returns whether the worker welcomed us; raises only CancelledError."""
        where = {"worker_id": self.record.worker_id, "address": self.record.grpc_address}
        welcomed = False
        channel = grpc.aio.insecure_channel(self.record.grpc_address, options=CHANNEL_OPTIONS)
        try:
            call: _Call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
            await self._welcome(call)
            welcomed = True
            _log.info("worker connected", **where, worker_role=self.record.role)
            await self._pump(call)
            _log.warning("worker ended the session", **where)
        except (grpc.aio.AioRpcError, BatonError, TimeoutError) as error:
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            _log.warning("worker session lost" if welcomed else "worker can't be reached", **where, reason=reason)
        except Exception:
            _log.exception("worker session failed", **where)
        finally:
            self._lose()
            await channel.close()
        return welcomed

    async def _welcome(self, call: _Call) -> None:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            await call.write(convert.hello_frame(self._router_id, self.record.epoch))
            response = await call.read()
        if not isinstance(response, worker_pb2.SessionResponse) or not response.HasField("welcome"):
            raise BatonError(ErrorKind.STALE_EPOCH, "the worker closed the session without a welcome")
        info = response.welcome.info
        if (info.worker_id, info.epoch) != (self.record.worker_id, self.record.epoch):
            raise BatonError(ErrorKind.STALE_EPOCH, f"{info.worker_id} of epoch {info.epoch} answers at this address")
        self._overflow.clear()
        beat_s = info.heartbeat_ms / 1e3
        self._allowed_silence_s = max(self._silence_s, MIN_MISSED_BEATS * beat_s) if beat_s else inf
        self._silence = SilenceTimer(LOOK_S, self._clock())
        self._draining = False
        self._state = SessionState.READY
        self.num_events[SessionEvent.CONNECTED] += 1
        self._on_change()

    async def _pump(self, call: _Call) -> None:
        """Reads until the stream ends; raises what ended it."""
        writer = asyncio.create_task(self._write(call))
        overflow = asyncio.create_task(self._overflow.wait())
        reader = asyncio.create_task(self._read(call))
        listener = asyncio.create_task(self._listen())
        tasks: tuple[asyncio.Task[Any], ...] = (reader, writer, overflow, listener)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if overflow.done():
                raise BatonError(ErrorKind.LEASE_LOST, f"the worker left {MAX_OUTBOX_FRAMES} commands unread")
            # A failed write means that the stream is over; the reader knows why.
            await asyncio.wait({reader}, timeout=1.0)
            (reader if reader.done() else writer).result()
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: _Call) -> None:
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox:
                await call.write(self._outbox.popleft())

    async def _read(self, call: _Call) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, worker_pb2.SessionResponse):
                return
            self._silence.heard()
            if response.HasField("step"):
                self._on_step(response.step)
            elif response.HasField("reserved"):
                self._on_reserved(response.reserved)

    async def _listen(self) -> None:
        """Judge the worker's silence, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._silence.look(self._clock()) >= self._allowed_silence_s and self.ready:
                self._fall_silent(f"nothing was heard for {self._silence.seconds:.1f} s")

    def _fall_silent(self, reason: str) -> None:
        """READY → SILENT: what runs there is told off, in case it reads that one day, and goes on elsewhere."""
        _log.warning("worker is silent", worker_id=self.record.worker_id, reason=reason)
        self._state = SessionState.SILENT
        self.num_events[SessionEvent.SILENT] += 1
        lost = self._subscriptions.remove_all()
        self._outbox.extend(convert.abort_frame(transfer_id) for transfer_id, _ in lost)
        self._outbox_filled.set()
        self._on_change()
        self._tell_loss(lost)

    def _follow(self, report: LoadReport) -> None:
        """What a report says of the worker's ability to work."""
        if report.engine_stalled and self.ready:
            self._fall_silent("its engine is stuck")
        elif self._state is SessionState.SILENT and not report.engine_stalled:
            _log.info("worker is heard again", worker_id=self.record.worker_id)
            self._state = SessionState.READY
            self._on_change()
        if report.draining != self._draining:
            self._draining = report.draining
            self._on_change()

    def _lose(self) -> None:
        """The connection is over: everybody hears of it once, and nothing of ours counts here any more."""
        was_connected = self._state in (SessionState.READY, SessionState.SILENT)
        self._state = SessionState.DIALLING
        self._outbox.clear()
        self._report = None
        lost = self._subscriptions.remove_all()
        if was_connected:
            self.num_events[SessionEvent.LOST] += 1
            self._on_change()
        self._tell_loss(lost)

    def _tell_loss(self, lost: Sequence[tuple[str, LegListener]]) -> None:
        for transfer_id, listener in lost:
            try:
                listener.on_lost(self._lost_error())
            except Exception:
                self._fail_listener(transfer_id, listener)

    # -- frames

    def _on_reserved(self, reserved: worker_pb2.Reserved) -> None:
        listener = self._subscriptions.confirmed(reserved.transfer_id)
        if listener is None:
            self.num_late_frames += 1
            return
        try:
            listener.on_reserved(target_from_proto(reserved.target))
        except Exception:
            self._fail_listener(reserved.transfer_id, listener)

    def _on_step(self, step: worker_pb2.StepOutput) -> None:
        if step.HasField("load"):
            self._report = load_from_proto(step.load)
            self._reported_at = self._clock()
            self._follow(self._report)
        for output in step.outputs:
            transfer_id, token_ids = output.transfer_id, output.token_ids
            table = self._subscriptions
            listener = table.answered(transfer_id) if token_ids else table.get(transfer_id)
            if listener is None:
                self.num_late_frames += 1
                continue
            try:
                if output.prompt_logprobs:
                    listener.on_prompt_logprobs(output.first_prompt_index, logprobs_from_proto(output.prompt_logprobs))
                if token_ids:
                    logprobs = logprobs_from_proto(output.logprobs) if output.logprobs else ()
                    listener.on_tokens(output.first_index, token_ids, logprobs)
                if convert.has_news(output):
                    if output.leg_ended:
                        table.remove(transfer_id)
                    listener.on_news(convert.news_from_proto(output))
            except Exception:
                self._fail_listener(transfer_id, listener)

    def _fail_listener(self, transfer_id: str, listener: LegListener) -> None:
        """A bug in one request's handling must not end the session of all others."""
        _log.exception("request handler failed", transfer_id=transfer_id)
        self._subscriptions.remove(transfer_id)
        with suppress(Exception):
            listener.on_lost(BatonError(ErrorKind.INTERNAL, "the router failed on a worker's answer"))

    def _lost_error(self) -> BatonError:
        problem = "has fallen silent" if self._state is SessionState.SILENT else "is not connected"
        return BatonError(ErrorKind.LEASE_LOST, f"worker {self.record.worker_id} {problem}")
