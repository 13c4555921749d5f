"""The side of a pull that lacks the prefix: reserves blocks, asks the worker that holds it, and receives.

engine thread ── pull ──► KvReceiver.reserve ──► Pull RPC to the owner ──► the owner sends into the landing ring
              ◄── on_commit | on_fail ── by the reservation, exactly once; release() takes it back at any time
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from baton.transfer.v1 import transfer_pb2 as pb
from baton.transfer.v1 import transfer_pb2_grpc
from common.errors import BatonError, ErrorKind
from common.rpc.convert import error_from_rpc
from common.rpc.worker_messages import PullSource, WorkerIdentity
from common.telemetry import get_logger
from kv_transfer.receiver import KvReceiver
from kv_transfer.types import Handoff, ReceiverCallbacks, TransferStats

CHANNEL_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)

log = get_logger(__name__)


@dataclass(slots=True)
class PullStats:
    """Of a worker's life. failed: by kind of error."""

    started: int = 0
    done: int = 0
    tokens: int = 0
    bytes: int = 0
    failed: Counter[ErrorKind] = field(default_factory=Counter)


class Puller:
    """address, identity: of this worker, for the owner to send to. block_size: of both. Pulls end with the receiver;
    close() only ends the questions that are under way."""

    def __init__(self, receiver: KvReceiver, address: str, identity: WorkerIdentity, block_size: int) -> None:
        self._receiver = receiver
        self._address = address
        self._identity = identity
        self._block_size = block_size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.stats = PullStats()

    def start(self) -> None:
        """On the event loop."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Idempotent."""
        self._loop = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Any thread.

    def pull(
        self,
        transfer_id: str,
        source: PullSource,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        num_held_tokens: int,
        callbacks: ReceiverCallbacks,
        timeout_s: float,
    ) -> None:
        """Fetch the blocks with these hashes into block_ids; the first of them begins at token num_held_tokens.

        Ends as KvReceiver.reserve says, but may commit fewer leading blocks: the handoff's num_computed_tokens says how
        far the KV reaches. Raises BatonError where nothing can be received now."""
        if self._loop is None:
            raise BatonError(ErrorKind.DRAINING, "this worker pulls nothing now")
        noted = self._noting(callbacks, num_held_tokens)
        secret = self._receiver.reserve(transfer_id, block_ids, num_held_tokens, noted, timeout_s, may_be_fewer=True)
        target = pb.PullTarget(
            address=self._address,
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            secret=secret,
            num_cached_tokens=num_held_tokens,
        )
        request = pb.PullRequest(
            transfer_id=transfer_id,
            epoch=source.worker.epoch,
            secret=source.secret,
            hashes=b"".join(block_hashes),
            block_size=self._block_size,
            target=target,
            timeout_ms=max(1, int(timeout_s * 1e3)),
        )
        self.stats.started += 1
        with contextlib.suppress(RuntimeError):  # a closed loop: the receiver has ended all reservations
            self._loop.call_soon_threadsafe(self._spawn, source, request, time.monotonic() + timeout_s)

    def release(self, transfer_id: str) -> None:
        """As KvReceiver.release."""
        self._receiver.release(transfer_id)

    # The event loop.

    def _spawn(self, source: PullSource, request: pb.PullRequest, deadline: float) -> None:
        task = asyncio.create_task(self._ask(source, request, deadline), name=f"pull {request.transfer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, source: PullSource, request: pb.PullRequest, deadline: float) -> None:
        """A refusal ends the reservation; what happens after a grant, the transfer tells."""
        try:
            async with grpc.aio.insecure_channel(source.address, options=CHANNEL_OPTIONS) as channel:
                stub = transfer_pb2_grpc.TransferServiceStub(channel)
                await stub.Pull(request, timeout=max(0.001, deadline - time.monotonic()))
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error, f"worker {source.worker.worker_id} at {source.address}")
            log.info("pull refused", peer=source.worker.worker_id, reason=error.message)
            self._receiver.fail(request.transfer_id, error)

    def _noting(self, callbacks: ReceiverCallbacks, num_held_tokens: int) -> ReceiverCallbacks:
        def on_commit(handoff: Handoff, stats: TransferStats) -> None:
            self.stats.done += 1
            self.stats.tokens += handoff.num_computed_tokens - num_held_tokens
            self.stats.bytes += stats.num_bytes
            callbacks.on_commit(handoff, stats)

        def on_fail(error: BatonError) -> None:
            self.stats.failed[error.kind] += 1
            callbacks.on_fail(error)

        return ReceiverCallbacks(on_commit, on_fail)
