"""The side of a pull that holds the prefix: admits the request, and lets the engine answer it.

puller ── Pull(secret, hashes, where to) ──► Lender ──► engine: pins, opens a transfer to the puller
       ◄── number of blocks, or why not ───────┘                └══ KV, like any other transfer ══►
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable
from typing import Final

from baton.transfer.v1 import transfer_pb2 as pb
from common.errors import BatonError, ErrorKind
from common.rpc.worker_messages import TransferTarget, WorkerIdentity
from kv_transfer.types import PullRequest

# However much time the puller has: blocks are not pinned longer for one pull.
MAX_LOAN_S: Final = 30.0
# The engine answers between two steps; one that hangs must not hold the puller.
ANSWER_TIMEOUT_S: Final = 5.0
HASH_BYTES: Final = 16
MAX_BLOCKS: Final = 1 << 16


class Lender:
    """lend(request, answer): asks the engine; thread-safe; `answer` is called once, in any thread. secret: only who
    shows it is served; routers know it."""

    def __init__(
        self,
        identity: WorkerIdentity,
        secret: bytes,
        block_size: int,
        lend: Callable[[PullRequest, Callable[[int | BatonError], None]], None],
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._block_size = block_size
        self._lend = lend
        self.num_granted = self.num_refused = 0

    async def serve(self, message: pb.PullRequest) -> pb.PullResponse:
        """Raises BatonError: to be told to the puller."""
        try:
            request = self._admit(message)
            num_blocks = await self._ask(request)
        except BatonError:
            self.num_refused += 1
            raise
        self.num_granted += 1
        return pb.PullResponse(num_blocks=num_blocks)

    def _admit(self, message: pb.PullRequest) -> PullRequest:
        me = self._identity
        if message.epoch != me.epoch:
            detail = f"worker {me.worker_id} has epoch {me.epoch!r}, not {message.epoch!r}: it was restarted"
            raise BatonError(ErrorKind.STALE_EPOCH, detail)
        if not hmac.compare_digest(message.secret, self._secret):
            raise BatonError(ErrorKind.LEASE_LOST, f"worker {me.worker_id} lends nothing without its secret")
        if message.block_size != self._block_size:
            detail = f"block_size: {self._block_size} here, {message.block_size} there"
            raise BatonError(ErrorKind.INTERNAL, f"a prefix can't be pulled from {me.worker_id}: {detail}")
        num_hashes, rest = divmod(len(message.hashes), HASH_BYTES)
        if rest or not 0 < num_hashes <= MAX_BLOCKS:
            raise BatonError(ErrorKind.INTERNAL, f"{len(message.hashes)} bytes of block hashes can't be")
        hashes = tuple(message.hashes[i : i + HASH_BYTES] for i in range(0, len(message.hashes), HASH_BYTES))
        to = message.target
        puller = WorkerIdentity(to.worker_id, to.epoch)
        target = TransferTarget(to.address, puller, to.secret, to.num_cached_tokens)
        deadline = time.monotonic() + min(message.timeout_ms / 1e3, MAX_LOAN_S)
        return PullRequest(message.transfer_id, hashes, target, deadline)

    async def _ask(self, request: PullRequest) -> int:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[int | BatonError] = loop.create_future()

        def settle(result: int | BatonError) -> None:
            if not answered.done():
                answered.set_result(result)

        def answer(result: int | BatonError) -> None:
            with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits
                loop.call_soon_threadsafe(settle, result)

        self._lend(request, answer)
        try:
            result = await asyncio.wait_for(answered, ANSWER_TIMEOUT_S)
        except TimeoutError:
            message = f"the engine of {self._identity.worker_id} does not answer"
            raise BatonError(ErrorKind.LEASE_LOST, message) from None
        if isinstance(result, BatonError):
            raise result
        return result
