"""The decode worker's end: reserves, receives into its landing ring, verifies, scatters.

engine thread ── reserve, release ──────────► ReceiverProtocol ◄── frames ── ReceiverChannel ◄── gRPC
                                                    │ landings
                                                    ▼
                                            landing threads ──► IncomingTransfer ──► KvStore, callbacks
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import grpc

from baton.transfer.v1 import transfer_pb2_grpc
from common.errors import BatonError, ErrorKind, StartupError
from common.kvcache.layout import KvStore
from common.telemetry import get_logger
from kv_transfer import convert
from kv_transfer.control_line import ControlListener
from kv_transfer.frames import Hello, ReceiverFrame, Welcome
from kv_transfer.landing_ring import Channel
from kv_transfer.lease import TICKS_PER_LEASE
from kv_transfer.lender import Lender
from kv_transfer.pieces import plan_geometry
from kv_transfer.receiver_channel import ReceiverChannel, TransferServicer
from kv_transfer.receiver_protocol import LandingJob, ReceiverProtocol
from kv_transfer.stats import ReceiverStats
from kv_transfer.transport.base import Region, Transport, TransportError, TransportFault
from kv_transfer.transport.lanes import ANY_KIND
from kv_transfer.transport.shared_memory import SharedMemory
from kv_transfer.transport.start import start_transport
from kv_transfer.types import KvFormat, ReceiverCallbacks, WorkerIdentity

MAX_CHANNELS: Final = 1024
# A transfer's share of the ring: enough to keep a put, a landing and a grant under way at any time.
SHARES: Final = 4
MIN_SHARE: Final = 2

log = get_logger(__name__)


class KvReceiver:
    """Serves TransferService: `add_to_server` adds it to the worker's gRPC server.

    A reservation's blocks may be written from reserve() until on_commit or on_fail runs, or release() returns; in that
    time they must be neither reused nor read.

    transport: not started; the receiver starts and closes it. lease_s: silence after which a sender counts as dead.
    require_transport: LaneKind that this host must have, or ANY_KIND. shares_ring: senders on this host may write into
    the landing ring directly.
    """

    def __init__(
        self,
        store: KvStore,
        fmt: KvFormat,
        identity: WorkerIdentity,
        *,
        transport: Transport,
        landing_slots: int,
        landing_slot_bytes: int,
        lease_s: float,
        require_transport: str = ANY_KIND,
        shares_ring: bool = True,
    ) -> None:
        """Raises StartupError if a block of one layer does not fit a landing slot."""
        try:
            plan_geometry(fmt.layout, landing_slot_bytes)
        except ValueError as error:
            raise StartupError(str(error)) from None
        self._format = fmt
        self._identity = identity
        self._transport = transport
        self._num_slots = landing_slots
        self._slot_bytes = landing_slot_bytes
        self._lease_s = lease_s
        self._require_transport = require_transport
        self._shares_ring = shares_ring
        self._shared: SharedMemory | None = None
        self._listener: ControlListener[ReceiverFrame] | None = None
        self._protocol = ReceiverProtocol(
            self,
            store,
            num_slots=landing_slots,
            slot_bytes=landing_slot_bytes,
            max_held_slots=max(MIN_SHARE, landing_slots // SHARES),
            lease_s=lease_s,
            clock=time.monotonic,
        )
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-landing")
        self._handlers: dict[ReceiverChannel, asyncio.Task[Any] | None] = {}
        self._ring: Region | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False
        self._quiet = asyncio.Event()

    async def start(self) -> None:
        """Raises StartupError if the transport or the ring's memory can't be had."""
        self._loop = asyncio.get_running_loop()
        try:
            self._ring = await self._loop.run_in_executor(self._executor, self._open_ring)
        except TransportError as error:
            self._executor.shutdown()
            raise StartupError(f"KV transfer can't start: {error}") from None
        if self._shared is not None:
            self._listener = ControlListener(_encode, self._lease_s)
            await self._listener.start()
        self._ticker = asyncio.create_task(self._tick())

    def _open_ring(self) -> Region:
        start_transport(self._transport, self._require_transport)
        try:
            if self._shares_ring:
                self._shared = SharedMemory(self._num_slots * self._slot_bytes)
            memory = None if self._shared is None else self._shared.view
            return self._transport.allocate(self._num_slots * self._slot_bytes, memory)
        except OSError as error:
            self._close_transport()
            raise TransportError(
                TransportFault.UNAVAILABLE, f"no shared memory for the landing ring: {error}"
            ) from None
        except BaseException:
            self._close_transport()
            raise

    def _close_transport(self) -> None:
        self._transport.close()
        if self._shared is not None:
            self._shared.close()

    def add_to_server(self, server: grpc.aio.Server, lender: Lender | None = None) -> None:
        """lender: answers those who want to pull from this worker; None: they are refused."""
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferServicer(self, lender), server)

    async def close(self) -> None:
        """End everything: open transfers fail with DRAINING, senders get up to a lease to return their slots. Call
        before the gRPC server is stopped. Idempotent."""
        if self._closing or self._loop is None or self._ticker is None:
            return
        self._closing = True
        error = BatonError(ErrorKind.DRAINING, f"decode worker {self._identity.worker_id} is shutting down")
        self._protocol.fail_all(error)
        self.slots_freed()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), self._lease_s)
        for channel in list(self._handlers):
            channel.end(error)
        handlers = [task for task in self._handlers.values() if task is not None]
        if handlers:
            await asyncio.wait(handlers, timeout=2 * self._lease_s)
        if self._listener is not None:
            self._listener.close()
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        await self._loop.run_in_executor(self._executor, self._close_transport)
        self._executor.shutdown()

    # Any thread.

    def reserve(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        num_cached_tokens: int,
        callbacks: ReceiverCallbacks,
        timeout_s: float,
        *,
        may_be_fewer: bool = False,
    ) -> bytes:
        """Expect a transfer into `block_ids`, the sequence's blocks that are not cached, in order (may be empty).

        Returns the secret that admits the sender. Ends with exactly one callback, unless released: on_commit; or
        on_fail with DEADLINE_EXCEEDED (not committed within timeout_s), LEASE_LOST (sender silent or gone), CORRUPT_KV,
        or what the sender says. may_be_fewer: the sender may leave blocks out at the end. num_cached_tokens: tokens
        whose blocks the worker holds already. Quick. Raises BatonError (INTERNAL: transfer_id is reserved; DRAINING:
        closing, or not started).
        """
        if self._closing or self._loop is None:
            raise BatonError(ErrorKind.DRAINING, f"decode worker {self._identity.worker_id} receives no KV now")
        return self._protocol.reserve(
            transfer_id, block_ids, num_cached_tokens, callbacks, timeout_s, may_be_fewer=may_be_fewer
        )

    def release(self, transfer_id: str) -> None:
        """Give a reservation up, for abort and for failure; the sender is told. No-op for what has ended.

        When it returns, nothing writes into the transfer's blocks, and no callback of it is running or will run; one
        may have run just before. Waits for at most one piece's copy and for a callback that is running: the caller must
        hold no lock that its callbacks want. Called from the transfer's own callback it returns at once.
        """
        transfer = self._protocol.release(transfer_id)
        if transfer is not None and self._loop is not None:
            # A closed loop has ended all channels: there is nobody to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._protocol.announce, transfer)

    def fail(self, transfer_id: str, error: BatonError) -> None:
        """Nobody will send: the reservation fails with `error`. For the event loop; no-op for what has ended."""
        self._protocol.fail(transfer_id, error)

    def stats(self) -> ReceiverStats:
        return self._protocol.stats()

    # Gate, on the event loop.

    def new_channel(self) -> ReceiverChannel:
        channel = ReceiverChannel(self._protocol, self._lease_s)
        self._handlers[channel] = asyncio.current_task()
        return channel

    def channel_done(self, channel: ReceiverChannel) -> None:
        del self._handlers[channel]
        if self._listener is not None:
            self._listener.withdraw(channel.control_token)

    def admit(self, channel: ReceiverChannel, hello: Hello) -> Welcome:
        try:
            welcome = self._check(hello)
        except BatonError as error:
            self._protocol.handshake_refused()
            log.warning("transfer handshake refused", peer=hello.worker.worker_id, reason=error.message)
            raise
        if self._listener is None:
            return welcome
        offer, channel.control_token = self._listener.offer(channel.attach)
        return replace(welcome, control_line=offer)

    def _check(self, hello: Hello) -> Welcome:
        me = self._identity
        if self._closing or self._ring is None or len(self._handlers) > MAX_CHANNELS:
            raise BatonError(ErrorKind.DRAINING, f"decode worker {me.worker_id} takes no more transfer channels")
        if hello.peer_epoch != me.epoch:
            message = f"decode worker {me.worker_id} has epoch {me.epoch!r}, not {hello.peer_epoch!r}: it was restarted"
            raise BatonError(ErrorKind.STALE_EPOCH, message)
        if not self._protocol.knows(hello.transfer_id, hello.secret):
            message = f"decode worker {me.worker_id} made no reservation for this sender: it learns nothing here"
            raise BatonError(ErrorKind.LEASE_LOST, message)
        if mismatch := self._format.mismatch(hello.format):
            message = f"KV of {hello.worker.worker_id} does not fit {me.worker_id}: {mismatch}"
            raise BatonError(ErrorKind.INTERNAL, message)
        return Welcome(
            self._ring.descriptor(),
            self._transport.name,
            self._slot_bytes,
            self._num_slots,
            self._lease_s,
            b"" if self._shared is None else self._shared.descriptor(),
        )

    # ReceiverPort, on the event loop.

    def send(self, channel: Channel, frame: ReceiverFrame) -> None:
        if isinstance(channel, ReceiverChannel):
            channel.send(frame)

    def end_channel(self, channel: Channel, error: BatonError) -> None:
        if isinstance(channel, ReceiverChannel):
            channel.end(error)

    def land(self, job: LandingJob) -> None:
        self._executor.submit(self._land, job)

    def _land(self, job: LandingJob) -> None:
        """In a landing thread."""
        if self._ring is None or self._loop is None:
            return
        start = job.written.grant.slot * self._slot_bytes
        landing = job.transfer.land(job.written, self._ring.view[start : start + job.written.num_bytes])
        self._loop.call_soon_threadsafe(self._protocol.landed, job, landing)

    def slots_freed(self) -> None:
        if self._closing and self._protocol.num_slots_out == 0:
            self._quiet.set()

    async def _tick(self) -> None:
        interval_s = self._lease_s / TICKS_PER_LEASE
        last = time.monotonic()
        while True:
            await asyncio.sleep(interval_s)
            now = time.monotonic()
            elapsed_s, last = now - last, now
            try:
                self._check_leases(elapsed_s)
                self._protocol.tick()
            except Exception:
                log.exception("a check of transfers failed")

    def _check_leases(self, elapsed_s: float) -> None:
        for channel in list(self._handlers):
            if channel.peer is not None and not channel.lease.tick(elapsed_s):
                message = f"prefill worker {channel.peer.worker_id} was silent for a lease of {self._lease_s} s"
                channel.end(BatonError(ErrorKind.LEASE_LOST, message))


def _encode(frames: list[ReceiverFrame]) -> bytes:
    return convert.receiver_frames_to_proto(frames).SerializeToString()
