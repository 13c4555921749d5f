"""One sender's channel at the receiver: handshake, then frames both ways until either side ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from baton.transfer.v1 import transfer_pb2 as pb
from baton.transfer.v1 import transfer_pb2_grpc
from common.errors import BatonError, ErrorKind
from common.rpc.convert import error_to_status
from common.telemetry import get_logger
from kv_transfer import convert
from kv_transfer.control_line import ControlLine
from kv_transfer.frames import Hello, ReceiverFrame, SenderFrame, Welcome
from kv_transfer.lease import Lease
from kv_transfer.lender import Lender
from kv_transfer.outbox import Outbox
from kv_transfer.receiver_protocol import ReceiverProtocol
from kv_transfer.types import WorkerIdentity

if TYPE_CHECKING:
    PullContext = grpc.aio.ServicerContext[pb.PullRequest, pb.PullResponse]
    Context = grpc.aio.ServicerContext[pb.ChannelRequest, pb.ChannelResponse]

log = get_logger(__name__)


class Gate(Protocol):
    """Who decides on channels: the receiver."""

    def new_channel(self) -> ReceiverChannel: ...

    def admit(self, channel: ReceiverChannel, hello: Hello) -> Welcome:
        """Raises BatonError naming what does not fit."""

    def channel_done(self, channel: ReceiverChannel) -> None: ...


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """baton.transfer.v1.TransferService on grpc.aio."""

    def __init__(self, gate: Gate, lender: Lender | None) -> None:
        """lender: None: nothing can be pulled from here."""
        self._gate = gate
        self._lender = lender

    async def Pull(self, request: pb.PullRequest, context: PullContext) -> pb.PullResponse:  # noqa: N802
        """Another worker wants cached blocks."""
        try:
            if self._lender is None:
                raise BatonError(ErrorKind.LEASE_LOST, "this worker lends nothing")
            return await self._lender.serve(request)
        except BatonError as error:
            await context.abort(*error_to_status(error))

    # grpc.aio also takes a coroutine that reads and writes by the context; the stubs know generators only.
    async def Channel(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """One sender, from Hello to its end."""
        channel = self._gate.new_channel()
        try:
            await channel.serve(context, self._gate)
        except BatonError as error:
            await context.abort(*error_to_status(error))
        finally:
            self._gate.channel_done(channel)


class ReceiverChannel:
    """Hashed by identity: the `Channel` of ReceiverProtocol. For one event loop."""

    def __init__(self, protocol: ReceiverProtocol, lease_s: float) -> None:
        self.lease = Lease(lease_s)
        self.peer: WorkerIdentity | None = None
        self.control_token = b""
        self._protocol = protocol
        self._lease_s = lease_s
        self._outbox: Outbox[ReceiverFrame] = Outbox()
        self._ended: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        self._line: ControlLine[ReceiverFrame] | None = None
        self._line_lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, frame: ReceiverFrame) -> None:
        if not (self._outbox if self._line is None else self._line).put(frame):
            self.end(BatonError(ErrorKind.LEASE_LOST, "the prefill worker does not read its transfer channel"))

    def end(self, error: BatonError) -> None:
        """Break the channel off; what waits to be sent is still sent if the peer takes it. The first error counts."""
        if not self._ended.done():
            self._ended.set_result(error)
        self._outbox.close()

    def attach(self, line: ControlLine[ReceiverFrame]) -> Callable[[bytes], None]:
        """Frames go by `line` from now on, both ways; who takes its messages."""
        self._line = line
        line.lost.add_done_callback(lambda _: self._line_lost.set_result(None))
        return lambda message: self._deliver(_frames_of(pb.ChannelRequest.FromString(message)))

    async def serve(self, context: Context, gate: Gate) -> None:
        """Runs until the channel has ended and the protocol knows it. Raises BatonError: to be told to the peer."""
        hello, rest = await self._read_hello(context)
        self.send(gate.admit(self, hello))
        self.peer = hello.worker
        log.info("transfer channel opened", peer=hello.worker.worker_id)
        self._protocol.channel_opened(self, hello.format.layout)
        self._deliver(rest)
        await self._exchange(context, hello.worker.worker_id)
        if self._ended.done():
            raise self._ended.result()

    async def _read_hello(self, context: Context) -> tuple[Hello, list[SenderFrame | None]]:
        try:
            async with asyncio.timeout(self._lease_s):
                message = await context.read()
        except TimeoutError:
            message = None
        frames = _frames_of(message) if isinstance(message, pb.ChannelRequest) else []
        if not frames or not isinstance(frames[0], Hello):
            raise BatonError(ErrorKind.INVALID_REQUEST, "a transfer channel starts with Hello")
        return frames[0], frames[1:]

    async def _exchange(self, context: Context, peer: str) -> None:
        """Until the peer closes its side, the channel is broken off, or the RPC is cancelled."""
        reader = asyncio.create_task(self._read(context))
        writer = asyncio.create_task(self._write(context))
        try:
            enders: set[asyncio.Future[Any]] = {reader, writer, self._ended, self._line_lost}
            await asyncio.wait(enders, return_when=asyncio.FIRST_COMPLETED)
            if self._line is not None and not self._ended.done():
                # Closed in order: what was sent before is heard.
                await asyncio.wait({self._line_lost}, timeout=self.lease.tick_s)
        finally:
            reader.cancel()
            self._outbox.close()
            if self._line is not None:
                self._line.close()
            lost = BatonError(ErrorKind.LEASE_LOST, f"prefill worker {peer} ended its transfer channel")
            reason = self._ended.result() if self._ended.done() else lost
            log.info("transfer channel ended", peer=peer, reason=reason.message)
            self._protocol.channel_lost(self, reason)
            await asyncio.wait({writer}, timeout=self.lease.tick_s)
            writer.cancel()
            for result in await asyncio.gather(reader, writer, return_exceptions=True):
                if isinstance(result, Exception):
                    log.debug("transfer channel broken", peer=peer, error=repr(result))
            if self._line is not None:
                self._line.abort()

    async def _read(self, context: Context) -> None:
        while isinstance(message := await context.read(), pb.ChannelRequest):
            self._deliver(_frames_of(message))

    def _deliver(self, frames: Iterable[SenderFrame | None]) -> None:
        self.lease.heard()
        try:
            for frame in frames:
                self._protocol.on_frame(self, frame)
        except Exception:
            log.exception("a frame could not be handled")
            raise

    async def _write(self, context: Context) -> None:
        while frames := await self._outbox.take():
            await context.write(convert.receiver_frames_to_proto(frames))


def _frames_of(message: pb.ChannelRequest) -> list[SenderFrame | None]:
    return [convert.sender_frame_from_proto(frame) for frame in message.frames]
