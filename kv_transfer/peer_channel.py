"""A sender's channel to one decode worker: a gRPC stream for frames (on one host a socket, control_line.py), an
endpoint for bytes, shared by its transfers.

connect, Hello/Welcome, endpoint; then frames and puts; ended by close, idleness, error or silence. After the end:
transfers fail, gathers under way are waited for, the endpoint is force-closed, the stream is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from baton.transfer.v1 import transfer_pb2 as pb
from baton.transfer.v1 import transfer_pb2_grpc
from common.errors import BatonError, ErrorKind
from common.kvcache.layout import KvStore
from common.rpc.convert import error_from_rpc
from common.telemetry import get_logger
from kv_transfer import convert
from kv_transfer.control_line import ControlLine, connect_line
from kv_transfer.frames import Heartbeat, Hello, SenderFrame, Welcome
from kv_transfer.lease import Lease
from kv_transfer.outbox import Outbox
from kv_transfer.outgoing import PieceJob
from kv_transfer.pieces import plan_geometry
from kv_transfer.sender_protocol import SenderProtocol, SenderTotals
from kv_transfer.staging_pool import StagingPool
from kv_transfer.transport.base import Endpoint, Region, Transport, TransportError, TransportFault
from kv_transfer.transport.lanes import ANY_KIND, LaneKind, unmet
from kv_transfer.transport.shared_memory import open_shared
from kv_transfer.types import KvFormat, TransferTarget, WorkerIdentity

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[pb.ChannelRequest, pb.ChannelResponse]

# A subchannel shared with an earlier attempt would make a new one wait out its back-off.
CHANNEL_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SenderParts:
    """What all channels of a sender share. executor: one thread, in which gathers run in order."""

    store: KvStore
    format: KvFormat
    identity: WorkerIdentity
    transport: Transport
    staging: Region
    staging_slot_bytes: int
    pool: StagingPool
    totals: SenderTotals
    executor: Executor
    lease_s: float
    idle_close_s: float
    require_transport: str


class PeerChannel:
    """Implements SenderPort. For one event loop."""

    def __init__(
        self,
        parts: SenderParts,
        transfer_id: str,
        target: TransferTarget,
        on_ending: Callable[[PeerChannel], None],
    ) -> None:
        """transfer_id, target: the reservation for which it is opened; its secret admits the whole channel."""
        self.address: Final = target.address
        self.worker: Final = target.worker
        self.lanes: tuple[str, ...] = ()
        self.protocol: Final = SenderProtocol(self, parts.pool, parts.totals, time.monotonic)
        self._parts = parts
        self._proof = (transfer_id, target.secret)
        self._on_ending = on_ending
        self._loop = asyncio.get_running_loop()
        self._outbox: Outbox[SenderFrame] = Outbox()
        self._broken: asyncio.Future[BatonError] = self._loop.create_future()
        self._lease = Lease(parts.lease_s)
        self._connecting: asyncio.Future[Endpoint] | None = None
        self._endpoint: Endpoint | None = None
        self._slot_bytes = 0
        self._window: npt.NDArray[np.uint8] | None = None
        self._line: ControlLine[SenderFrame] | None = None
        self._is_up = False
        self._ending = False
        self._finishing = False
        self._idle = asyncio.Event()

    async def run(self) -> None:
        """The channel's whole life. Raises nothing but CancelledError."""
        ticker = asyncio.create_task(self._tick())
        channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        reason = self._lost_error("shutdown could wait no longer")
        try:
            reason = await self._serve(channel)
        finally:
            ticker.cancel()
            self._end()
            log.info("transfer channel ended", peer=self.worker.worker_id, reason=reason.message)
            self.protocol.lost(reason)
            await asyncio.gather(ticker, return_exceptions=True)
            await self._settle()
            await channel.close()

    async def finish(self, error: BatonError, timeout_s: float) -> None:
        """Abort what is under way, tell the peer, and close the stream in order. `run` then ends."""
        self._end()
        self._finishing = True
        self.protocol.abort_all(error)
        self.job_ended()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        self._close_frames()
        if not self._is_up:
            self.break_off(error)

    # SenderPort.

    def send(self, frame: SenderFrame) -> None:
        self._lease.sent()
        if not (self._outbox if self._line is None else self._line).put(frame):
            self.break_off(self._lost_error("it does not read its transfer channel"))

    def break_off(self, error: BatonError) -> None:
        if not self._broken.done():
            self._broken.set_result(error)
        self._outbox.close()

    def job_ended(self) -> None:
        if self._finishing and self.protocol.is_idle:
            self._idle.set()

    def transmit(self, job: PieceJob) -> None:
        transfer = job.transfer
        self._parts.executor.submit(self._gather, job, transfer.ids_of(job.piece))

    def put(self, job: PieceJob) -> None:
        def done(error: TransportError | None) -> None:
            lost = self._lost_error(str(error)) if error is not None else None
            self._loop.call_soon_threadsafe(self.protocol.put_done, job, lost)

        if self._endpoint is None or job.staging_slot is None:
            done(TransportError(TransportFault.CLOSED, "no endpoint"))
            return
        source = job.staging_slot * self._parts.staging_slot_bytes
        target = job.grant.slot * self._slot_bytes
        self._endpoint.put(self._parts.staging, source, target, job.num_bytes, self._parts.lease_s, done)

    def _gather(self, job: PieceJob, block_ids: list[int]) -> None:
        """In the gather thread."""
        data = self._memory_of(job)
        try:
            checksum = self._parts.store.gather(job.piece.first_layer, job.piece.num_layers, block_ids, data)
        except Exception as error:
            log.exception("gather failed", transfer_id=job.transfer.transfer_id)
            failure = BatonError(ErrorKind.INTERNAL, f"KV of {job.transfer.transfer_id} can't be read: {error}")
            self._loop.call_soon_threadsafe(self.protocol.gather_failed, job, failure)
            return
        if job.staging_slot is None:
            self._loop.call_soon_threadsafe(self._gathered_direct, job, checksum)
            return
        self._loop.call_soon_threadsafe(self.protocol.gathered, job, checksum)
        self.put(job)

    def _memory_of(self, job: PieceJob) -> npt.NDArray[np.uint8]:
        """Where the piece is gathered: its staging slot, or the granted slot itself."""
        if self._window is not None and job.staging_slot is None:
            start, memory = job.grant.slot * self._slot_bytes, self._window
        else:
            start, memory = (job.staging_slot or 0) * self._parts.staging_slot_bytes, self._parts.staging.view
        return memory[start : start + job.num_bytes]

    def _gathered_direct(self, job: PieceJob, checksum: int) -> None:
        self.protocol.gathered(job, checksum)
        self.protocol.put_done(job, None)

    # The channel's life.

    async def _serve(self, channel: grpc.aio.Channel) -> BatonError:
        """Until the channel has ended; why it did."""
        try:
            async with asyncio.timeout(self._parts.lease_s):
                call, welcome = await self._shake_hands(channel)
                await self._connect(welcome)
            return await self._exchange(call)
        except BatonError as error:
            return error
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error, self._name)
        except TimeoutError:
            return self._lost_error(f"no answer to Hello within {self._parts.lease_s} s")
        except (TransportError, ValueError) as error:
            return BatonError(ErrorKind.INTERNAL, f"can't send KV to {self._name}: {error}")

    async def _shake_hands(self, channel: grpc.aio.Channel) -> tuple[Call, Welcome]:
        call: Call = transfer_pb2_grpc.TransferServiceStub(channel).Channel()
        hello = Hello(self._parts.identity, self.worker.epoch, self._parts.format, *self._proof)
        # Where the connection fails at once, write finds the call finished; read says why.
        with contextlib.suppress(asyncio.InvalidStateError):
            await call.write(convert.sender_frames_to_proto([hello]))
        message = await call.read()
        frames = message.frames if isinstance(message, pb.ChannelResponse) else []
        welcome = convert.receiver_frame_from_proto(frames[0]) if frames else None
        if not isinstance(welcome, Welcome):
            raise self._lost_error("its answer to Hello is not Welcome")
        return call, welcome

    async def _connect(self, welcome: Welcome) -> None:
        """Raises ValueError where a block does not fit a slot, or the lanes are not of the kind that is required."""
        parts = self._parts
        if welcome.transport != parts.transport.name:
            raise ValueError(f"transport is {parts.transport.name!r} here, {welcome.transport!r} there")
        geometry = plan_geometry(parts.format.layout, min(parts.staging_slot_bytes, welcome.slot_bytes))
        self._connecting = asyncio.wrap_future(parts.transport.connect(welcome.descriptor, self._on_endpoint_lost))
        # Shielded: an endpoint that comes into being after we gave up must still be found, and closed.
        self._endpoint = await asyncio.shield(self._connecting)
        self._slot_bytes = welcome.slot_bytes
        self.lanes = self._endpoint.lanes
        if parts.require_transport in (ANY_KIND, LaneKind.SHM):
            self._window = self._map_ring(welcome)
        if (problem := unmet(parts.require_transport, self.lanes)) is not None:
            raise ValueError(problem)
        if self._window is not None and welcome.control_line:
            self._line = await connect_line(welcome.control_line, _encode, self._on_line)
        log.info("transfer channel opened", peer=self.worker.worker_id, lanes=", ".join(self.lanes))
        self._lease = Lease(min(parts.lease_s, welcome.lease_s))
        self._is_up = True
        self.protocol.welcome(geometry, welcome.num_slots, direct=self._window is not None)

    def _map_ring(self, welcome: Welcome) -> npt.NDArray[np.uint8] | None:
        """The landing ring, where it is on this host and offered: pieces are then gathered into it without a put."""
        window = open_shared(welcome.shared_ring) if welcome.shared_ring else None
        if window is None or window.nbytes != welcome.num_slots * welcome.slot_bytes:
            return None
        self.lanes = ("shared-ring/memory", *self.lanes)
        return window

    def _on_endpoint_lost(self, error: TransportError) -> None:
        self._loop.call_soon_threadsafe(self.break_off, self._lost_error(str(error)))

    async def _exchange(self, call: Call) -> BatonError:
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        try:
            heard: set[asyncio.Future[Any]] = {reader} if self._line is None else {reader, self._line.lost}
            await asyncio.wait({*heard, writer, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if not self._broken.done():
                # Closed in order, or broken under us: what was sent before is heard, and why.
                await asyncio.wait(heard, timeout=self._lease.tick_s)
            if self._broken.done():
                return self._broken.result()
            if reader.done() and isinstance(error := reader.exception(), grpc.aio.AioRpcError):
                return error_from_rpc(error, self._name)
            return self._lost_error("its transfer channel was closed")
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            call.cancel()

    async def _read(self, call: Call) -> None:
        while isinstance(message := await call.read(), pb.ChannelResponse):
            self._hear(message)

    def _on_line(self, message: bytes) -> None:
        self._hear(pb.ChannelResponse.FromString(message))

    def _hear(self, message: pb.ChannelResponse) -> None:
        self._lease.heard()
        try:
            for frame in message.frames:
                self.protocol.on_frame(convert.receiver_frame_from_proto(frame))
        except Exception:
            log.exception("a frame could not be handled", peer=self.worker.worker_id)
            raise

    async def _write(self, call: Call) -> None:
        while frames := await self._outbox.take():
            await call.write(convert.sender_frames_to_proto(frames))
        await call.done_writing()

    async def _tick(self) -> None:
        last, idle_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(self._lease.tick_s)
            now = time.monotonic()
            elapsed_s, last = now - last, now
            idle_s = idle_s + elapsed_s if self.protocol.is_idle else 0.0
            try:
                self._check(elapsed_s, idle_s)
            except Exception:
                log.exception("a check of the transfer channel failed", peer=self.worker.worker_id)

    def _check(self, elapsed_s: float, idle_s: float) -> None:
        """Deadlines, the lease, idleness."""
        self.protocol.tick()
        if not self._is_up:
            return
        if not self._lease.tick(elapsed_s):
            self.break_off(self._lost_error(f"silent for a lease of {self._parts.lease_s} s"))
        elif self._lease.heartbeat_due:
            self.send(Heartbeat())
        if idle_s > self._parts.idle_close_s:
            self._end()
            self._close_frames()

    def _close_frames(self) -> None:
        """Those that wait still go out."""
        if self._line is not None:
            self._line.close()
        self._outbox.close()

    def _end(self) -> None:
        """From now on no new transfer comes here."""
        if not self._ending:
            self._ending = True
            self._on_ending(self)

    async def _settle(self) -> None:
        """Gathers and puts of transfers that have failed come to their end."""
        if self._line is not None:
            self._line.abort()
        await self._loop.run_in_executor(self._parts.executor, int)
        if self._connecting is not None:
            with contextlib.suppress(TransportError):
                await asyncio.wrap_future((await self._connecting).close())

    @property
    def _name(self) -> str:
        return f"decode worker {self.worker.worker_id} at {self.address}"

    def _lost_error(self, why: str) -> BatonError:
        return BatonError(ErrorKind.LEASE_LOST, f"lost {self._name}: {why}")


def _encode(frames: list[SenderFrame]) -> bytes:
    return convert.sender_frames_to_proto(frames).SerializeToString()
