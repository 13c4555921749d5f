"""The prefill worker's end: gathers blocks as they become final, and puts them into the decode worker's landing ring.

engine thread ── open, push, commit, abort ──► event loop: PeerChannel, SenderProtocol ◄── gRPC
                                                    │ pieces
                                                    ▼
                                            gather thread: KvStore → staging ──► transport thread: put, flush
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from common.errors import BatonError, ErrorKind, StartupError
from common.kvcache.layout import KvStore
from kv_transfer.outgoing import Outgoing
from kv_transfer.peer_channel import PeerChannel, SenderParts
from kv_transfer.pieces import plan_geometry
from kv_transfer.sender_protocol import SenderTotals
from kv_transfer.staging_pool import StagingPool
from kv_transfer.stats import SenderStats
from kv_transfer.transport.base import Region, Transport, TransportError
from kv_transfer.transport.lanes import ANY_KIND
from kv_transfer.transport.start import start_transport
from kv_transfer.types import Handoff, KvFormat, OutgoingTransfer, SenderCallbacks, TransferTarget, WorkerIdentity

DEFAULT_IDLE_CLOSE_S: Final = 60.0


class KvSender:
    """One channel a decode worker, opened at its first transfer, closed when idle.

    transport: not started; the sender starts and closes it. staging_slots × staging_slot_bytes: memory for pieces under
    way to all peers; a single peer may hold half of it. lease_s: silence after which a decode worker counts as dead,
    and the time in which a connection must come up, and a put must be complete. require_transport: LaneKind that must
    lead to each decode worker, or ANY_KIND.
    """

    def __init__(
        self,
        store: KvStore,
        fmt: KvFormat,
        identity: WorkerIdentity,
        *,
        transport: Transport,
        staging_slots: int,
        staging_slot_bytes: int,
        lease_s: float,
        idle_close_s: float = DEFAULT_IDLE_CLOSE_S,
        require_transport: str = ANY_KIND,
    ) -> None:
        """Raises StartupError if a block of one layer does not fit a staging slot."""
        try:
            plan_geometry(fmt.layout, staging_slot_bytes)
        except ValueError as error:
            raise StartupError(str(error)) from None
        self._store = store
        self._format = fmt
        self._identity = identity
        self._transport = transport
        self._slot_bytes = staging_slot_bytes
        self._num_slots = staging_slots
        self._lease_s = lease_s
        self._idle_close_s = idle_close_s
        self._require_transport = require_transport
        self._pool = StagingPool(staging_slots, max_held=max(1, staging_slots // 2))
        self._totals = SenderTotals()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-gather")
        self._peers: dict[tuple[str, str], PeerChannel] = {}
        self._tasks: dict[PeerChannel, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._parts: SenderParts | None = None
        self._closing = False

    async def start(self) -> None:
        """Raises StartupError if the transport or the staging memory can't be had."""
        self._loop = asyncio.get_running_loop()
        try:
            staging = await self._loop.run_in_executor(self._executor, self._open_staging)
        except TransportError as error:
            self._executor.shutdown()
            raise StartupError(f"KV transfer can't start: {error}") from None
        self._parts = SenderParts(
            self._store,
            self._format,
            self._identity,
            self._transport,
            staging,
            self._slot_bytes,
            self._pool,
            self._totals,
            self._executor,
            self._lease_s,
            self._idle_close_s,
            self._require_transport,
        )

    def _open_staging(self) -> Region:
        start_transport(self._transport, self._require_transport)
        try:
            return self._transport.allocate(self._num_slots * self._slot_bytes)
        except BaseException:
            self._transport.close()
            raise

    async def close(self) -> None:
        """Abort all transfers (they end with DRAINING), tell the peers, close everything. Idempotent."""
        if self._closing or self._loop is None or self._parts is None:
            return
        self._closing = True
        error = self._draining()
        await asyncio.gather(*(peer.finish(error, self._lease_s) for peer in list(self._tasks)))
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=2 * self._lease_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.run_in_executor(self._executor, self._transport.close)
        self._executor.shutdown()

    def open(
        self,
        transfer_id: str,
        target: TransferTarget,
        expected_num_blocks: int,
        callbacks: SenderCallbacks,
        timeout_s: float,
    ) -> OutgoingTransfer:
        """Begin a transfer of `expected_num_blocks` blocks, those after the target's cached ones. Any thread.

        Raises BatonError (DRAINING) where the sender is not started, or closing. All else is told by on_end: LEASE_LOST
        (peer unreachable, silent or gone; reservation gone), STALE_EPOCH, CORRUPT_KV, DEADLINE_EXCEEDED after
        timeout_s, DRAINING, INTERNAL (formats differ; misuse).
        """
        if self._loop is None or self._closing:
            raise self._draining()
        deadline = time.monotonic() + timeout_s
        transfer = Outgoing(transfer_id, target, expected_num_blocks, callbacks, deadline)
        handle = _Handle(self._loop, transfer)
        self._loop.call_soon_threadsafe(self._open, handle)
        return handle

    def stats(self) -> SenderStats:
        peers = list(self._tasks)
        return SenderStats(
            ended=dict(self._totals.ended),
            failed=dict(self._totals.failed),
            dropped_frames=dict(self._totals.dropped),
            pieces_sent=self._totals.pieces_sent,
            pieces_resent=self._totals.pieces_resent,
            bytes_sent=self._totals.bytes_sent,
            open_transfers=sum(peer.protocol.num_transfers for peer in peers),
            free_staging_slots=self._pool.num_free,
            lanes={peer.worker.worker_id: peer.lanes for peer in peers},
        )

    def _draining(self) -> BatonError:
        return BatonError(ErrorKind.DRAINING, f"prefill worker {self._identity.worker_id} sends no KV now")

    # The event loop.

    def _open(self, handle: _Handle) -> None:
        transfer = handle.transfer
        if self._closing or self._parts is None:
            transfer.callbacks.on_end(self._draining())
            return
        key = (transfer.target.address, transfer.target.worker.epoch)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = PeerChannel(self._parts, transfer.transfer_id, transfer.target, self._forget)
            task = asyncio.create_task(peer.run())
            self._tasks[peer] = task
            task.add_done_callback(self._finished)
        handle.channel = peer
        peer.protocol.add(transfer)

    def _finished(self, task: asyncio.Task[None]) -> None:
        for peer in [peer for peer, own in self._tasks.items() if own is task]:
            del self._tasks[peer]

    def _forget(self, peer: PeerChannel) -> None:
        """The channel takes no new transfers: the next one opens another."""
        key = (peer.address, peer.worker.epoch)
        if self._peers.get(key) is peer:
            del self._peers[key]


class _Handle:
    """Implements OutgoingTransfer: hands each call over to the event loop, which keeps their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transfer: Outgoing) -> None:
        self.transfer = transfer
        # Set on the event loop when the transfer has got its channel; None where it was refused.
        self.channel: PeerChannel | None = None
        self._loop = loop

    def push(self, block_ids: Sequence[int]) -> None:
        ids = tuple(block_ids)
        self._do(lambda channel: channel.protocol.push(self.transfer, ids))

    def commit(self, handoff: Handoff) -> None:
        self._do(lambda channel: channel.protocol.commit(self.transfer, handoff))

    def abort(self) -> None:
        error = BatonError(ErrorKind.CANCELLED, "given up by the prefill worker")
        self._do(lambda channel: channel.protocol.abort(self.transfer, error))

    def _do(self, action: Callable[[PeerChannel], None]) -> None:
        def run() -> None:
            if self.channel is not None:
                action(self.channel)

        # A closed loop has ended all transfers.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(run)
