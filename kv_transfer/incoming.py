"""One transfer at the receiver, from its reservation to its end: the only place that writes into its blocks.

    event loop      open, claim, commit, fail ─┐
    landing threads land ──────────────────────┼─► one lock ─► state, coverage, the one callback
    any thread      release ───────────────────┘

The lock is held while a callback runs, but not while bytes are copied: copies are counted instead, and whoever ends the
transfer while one is under way leaves the callback to the last of them. So when on_fail runs, or release() returns, no
copy is under way, none will start, and the blocks may be given back.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from common.errors import BatonError, ErrorKind
from common.kvcache.layout import KvLayout, KvStore
from common.kvcache.reshape import Reshape
from common.telemetry import get_logger
from kv_transfer.frames import CommitTransfer, Manifest, SlotWritten
from kv_transfer.pieces import Coverage, Piece
from kv_transfer.state import INCOMING_MOVES, IncomingState
from kv_transfer.types import ReceiverCallbacks, TransferStats

SECRET_BYTES: Final = 16
MAX_RESENDS: Final = 2

log = get_logger(__name__)


class Landing(Enum):
    """What became of a written slot."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # checksum mismatch: to be sent again
    LATE = "late"  # the transfer has ended


class IncomingTransfer:
    """block_ids: blocks to be filled, in sequence order. deadline: monotonic seconds, for everything up to commit.

    may_be_fewer: a sender with fewer blocks is welcome; the rest of ours stays as it is.

    Hashed by identity. channel: of the sender that opened it; for the event loop's use.
    """

    def __init__(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        num_cached_tokens: int,
        callbacks: ReceiverCallbacks,
        *,
        store: KvStore,
        deadline: float,
        clock: Callable[[], float],
        may_be_fewer: bool = False,
    ) -> None:
        self.transfer_id: Final = transfer_id
        self.deadline: Final = deadline
        self.secret: Final = secrets.token_bytes(SECRET_BYTES)
        self.channel: object = None
        self.error: BatonError | None = None
        self._block_ids = tuple(block_ids)
        self._num_cached_tokens = num_cached_tokens
        self._may_be_fewer = may_be_fewer
        self._callbacks = callbacks
        self._store = store
        # How the sender's blocks fill ours: known from open() on.
        self._reshape = self._reshape_of(store.layout)
        self._clock = clock
        self._lock = threading.RLock()
        self._no_copies = threading.Condition(self._lock)
        self._copies = 0
        self._state = IncomingState.RESERVED
        self._final_call: Callable[[], None] | None = None
        self._coverage = Coverage(store.layout.num_layers, 0)
        self._num_wire_blocks = 0
        self._claimed = 0
        self._refusals: Counter[Piece] = Counter()
        self._awaited_again: set[Piece] = set()
        self._landed = Manifest()
        self._commit: CommitTransfer | None = None
        self._started_at: float | None = None
        self._num_bytes = 0

    @property
    def state(self) -> IncomingState:
        return self._state

    @property
    def expected_bytes(self) -> int:
        """From a sender whose blocks are shaped as ours."""
        layout = self._store.layout
        return len(self._block_ids) * layout.num_layers * layout.block_bytes

    def accepts_secret(self, secret: bytes) -> bool:
        """In constant time."""
        return hmac.compare_digest(self.secret, secret)

    def open(self, channel: object, wire: KvLayout, expected_bytes: int) -> bool:
        """The sender has proved the reservation, and will send so many bytes of blocks in the layout `wire`. False:
        opened before, or ended. Fails the transfer where they don't fill its blocks."""
        with self._lock:
            if not self._move(IncomingState.RECEIVING):
                return False
            self.channel = channel
            self._reshape = self._reshape_of(wire)
            self._num_wire_blocks, rest = divmod(expected_bytes, wire.num_layers * wire.block_bytes)
            if self._may_be_fewer and self._reshape.is_plain and 0 < self._num_wire_blocks < len(self._block_ids):
                self._block_ids = self._block_ids[: self._num_wire_blocks]
                self._reshape = self._reshape_of(wire)
            if rest or not self._reshape.fits(self._num_wire_blocks):
                message = (
                    f"transfer {self.transfer_id}: the prefill worker would send {expected_bytes} bytes, in blocks of "
                    f"{wire.block_size} tokens; the reservation lacks {self.expected_bytes}, "
                    f"in blocks of {self._store.layout.block_size}"
                )
                self._end(IncomingState.ABORTED, BatonError(ErrorKind.INTERNAL, message))
                self._finish()
            else:
                self._coverage = Coverage(wire.num_layers, self._num_wire_blocks)
            return True

    def claim(self, written: SlotWritten) -> bool:
        """Check a piece and set its units aside; True obliges the caller to land() it. False: not a valid piece."""
        with self._lock:
            if written.num_bytes != written.piece.num_units * self._reshape.wire.block_bytes:
                return False
            if not self._coverage.claim(written.piece):
                return False
            self._awaited_again.discard(written.piece)
            self._claimed += 1
            if self._started_at is None:
                self._started_at = self._clock()
            return True

    def land(self, written: SlotWritten, data: npt.NDArray[np.uint8]) -> Landing:
        """Copy a claimed piece into its blocks and verify what was copied: see landing_ring.py. Any thread.

        data: uint8 [written.num_bytes], the slot. Nothing reads the blocks before commit, so that a refused piece's
        bytes in them harm nobody.
        """
        with self._lock:
            if self._state is not IncomingState.RECEIVING:
                return Landing.LATE
            self._copies += 1
        checksum: int | None = None
        failure: BatonError | None = None
        try:
            checksum = self._copy(written.piece, data)
        except Exception as error:
            log.exception("scatter failed", transfer_id=self.transfer_id)
            failure = BatonError(ErrorKind.INTERNAL, f"transfer {self.transfer_id}: the KV store refused it: {error}")
        with self._lock:
            self._copies -= 1
            if failure is not None:
                self._end(IncomingState.ABORTED, failure)
            landing = self._landed_one(written, checksum)
            self._settle()
            self._finish()
        return landing

    def set_manifest(self, commit: CommitTransfer) -> bool:
        """The sender has sent everything. Commits as soon as all of it is verified. False: not now, or twice."""
        with self._lock:
            if self._state is not IncomingState.RECEIVING or self._commit is not None:
                return False
            self._commit = commit
            self._settle()
            self._finish()
            return True

    def fail(self, error: BatonError, state: IncomingState = IncomingState.ABORTED) -> bool:
        """End without commit. on_fail runs once no copy is under way, maybe before this returns. False: has ended."""
        with self._lock:
            ended = self._end(state, error)
            self._finish()
            return ended

    def release(self) -> bool:
        """The owner wants its blocks back. On return nothing writes into them and no callback is running or will run
        (unless called from the callback itself). Waits for at most the copy under way. False: it had ended before."""
        with self._lock:
            moved = self._move(IncomingState.ABORTED)
            if moved:
                self.error = BatonError(ErrorKind.CANCELLED, "given up by the decode worker")
            # Also where another thread has failed it a moment ago: that callback comes too late now.
            self._final_call = None
            while self._copies:
                self._no_copies.wait()
            return moved

    def _copy(self, piece: Piece, data: npt.NDArray[np.uint8]) -> int:
        first_layer, num_layers, reshape = piece.first_layer, piece.num_layers, self._reshape
        if reshape.is_plain:
            ids = self._block_ids[piece.first_block : piece.first_block + piece.num_blocks]
            return self._store.scatter(first_layer, num_layers, ids, data)
        parts = reshape.parts(piece.first_block, piece.num_blocks)
        return self._store.scatter_parts(first_layer, num_layers, self._block_ids, data, parts, reshape)

    def _reshape_of(self, wire: KvLayout) -> Reshape:
        return Reshape(wire, self._store.layout, self._num_cached_tokens, len(self._block_ids))

    # The rest runs with the lock held.

    def _move(self, state: IncomingState) -> bool:
        if state not in INCOMING_MOVES[self._state]:
            return False
        self._state = state
        return True

    def _landed_one(self, written: SlotWritten, checksum: int | None) -> Landing:
        self._claimed -= 1
        self._num_bytes += written.num_bytes
        if self._state is not IncomingState.RECEIVING:
            return Landing.LATE
        if checksum == written.checksum:
            self._landed = self._landed.plus(written.num_bytes, written.checksum)
            return Landing.ACCEPTED
        self._coverage.unclaim(written.piece)
        self._awaited_again.add(written.piece)
        self._refusals[written.piece] += 1
        if self._refusals[written.piece] > MAX_RESENDS:
            self._corrupt(f"{written.piece} came {MAX_RESENDS + 1} times with a wrong checksum")
        return Landing.REFUSED

    def _settle(self) -> None:
        """Commit, or fail, once the manifest is there and nothing is under way or awaited."""
        if self._state is not IncomingState.RECEIVING:
            return
        if self._commit is None or self._claimed or self._awaited_again:
            return
        manifest, handoff = self._commit.manifest, self._commit.handoff
        if not self._coverage.is_complete or manifest != self._landed:
            self._corrupt(
                f"manifest {manifest}, landed {self._landed}, all blocks filled: {self._coverage.is_complete}"
            )
        elif handoff.num_computed_tokens > (held := self._reshape.num_tokens(self._num_wire_blocks)):
            self._corrupt(f"{handoff.num_computed_tokens} tokens computed, the reserved blocks hold {held}")
        elif self._move(IncomingState.COMMITTED):
            self._final_call = lambda: self._callbacks.on_commit(handoff, self._stats())

    def _stats(self) -> TransferStats:
        now = self._clock()
        return TransferStats(now - (now if self._started_at is None else self._started_at), self._num_bytes, now)

    def _corrupt(self, what: str) -> None:
        error = BatonError(ErrorKind.CORRUPT_KV, f"transfer {self.transfer_id}: {what}")
        self._end(IncomingState.ABORTED, error)

    def _end(self, state: IncomingState, error: BatonError) -> bool:
        if not self._move(state):
            return False
        self.error = error
        self._final_call = lambda: self._callbacks.on_fail(error)
        return True

    def _finish(self) -> None:
        if self._copies:
            return
        self._no_copies.notify_all()
        call, self._final_call = self._final_call, None
        if call is None:
            return
        try:
            call()
        except Exception:
            log.exception("a transfer's callback failed", transfer_id=self.transfer_id)
