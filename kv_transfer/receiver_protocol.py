"""What a receiver does on each frame: reservations, grants, landings, ends. No I/O, no clock of its own.

`reserve` and the barrier half of `release` may be called from any thread; everything else belongs to one event loop. A
frame that is late, repeated, or about something unknown is counted and dropped.
"""

from __future__ import annotations

import hmac
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from common.errors import BatonError, ErrorKind
from common.kvcache.layout import KvLayout, KvStore
from kv_transfer.frames import (
    AbortTransfer,
    Committed,
    CommitTransfer,
    GrantSlots,
    Heartbeat,
    OpenTransfer,
    ReceiverFrame,
    RequestSlots,
    ReturnSlots,
    SenderFrame,
    SlotLanded,
    SlotWritten,
    TransferEnded,
)
from kv_transfer.incoming import IncomingTransfer, Landing
from kv_transfer.landing_ring import Channel, LandingRing, SlotState
from kv_transfer.state import IncomingState, is_final
from kv_transfer.stats import Dropped, ReceiverStats
from kv_transfer.types import ReceiverCallbacks

# Of the newest reservations: who knows one of their secrets may open a channel, even if that one has ended meanwhile.
MAX_KNOWN_SECRETS: Final = 4096


@dataclass(frozen=True, slots=True)
class LandingJob:
    channel: Channel
    transfer: IncomingTransfer
    written: SlotWritten


class ReceiverPort(Protocol):
    """What the protocol needs done."""

    def send(self, channel: Channel, frame: ReceiverFrame) -> None:
        """Without waiting; dropped if the channel is gone."""

    def land(self, job: LandingJob) -> None:
        """Run job.transfer.land on the slot's bytes in another thread, then call `landed` on the event loop."""

    def end_channel(self, channel: Channel, error: BatonError) -> None:
        """Break the channel off; `channel_lost` follows."""

    def slots_freed(self) -> None:
        """`num_slots_out` may have fallen."""


class ReceiverProtocol:
    """max_held_slots: a transfer's share of the landing ring."""

    def __init__(
        self,
        port: ReceiverPort,
        store: KvStore,
        *,
        num_slots: int,
        slot_bytes: int,
        max_held_slots: int,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._port = port
        self._store = store
        self._slot_bytes = slot_bytes
        self._lease_s = lease_s
        self._clock = clock
        self._ring: LandingRing[IncomingTransfer] = LandingRing(num_slots, max_held_slots)
        self._lock = threading.Lock()
        # Who takes a transfer out of here announces its end: that happens once.
        self._transfers: dict[str, IncomingTransfer] = {}
        self._by_channel: dict[Channel, set[IncomingTransfer]] = {}
        self._layouts: dict[Channel, KvLayout] = {}
        self._secrets: OrderedDict[str, bytes] = OrderedDict()
        self._ended: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._pieces_landed = self._pieces_rejected = self._bytes_landed = self._refused_handshakes = 0

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
        """The reservation's secret. Raises BatonError (INTERNAL) if transfer_id is reserved."""
        deadline = self._clock() + timeout_s
        transfer = IncomingTransfer(
            transfer_id,
            block_ids,
            num_cached_tokens,
            callbacks,
            store=self._store,
            deadline=deadline,
            clock=self._clock,
            may_be_fewer=may_be_fewer,
        )
        with self._lock:
            if transfer_id in self._transfers:
                raise BatonError(ErrorKind.INTERNAL, f"transfer {transfer_id} is reserved already")
            self._transfers[transfer_id] = transfer
            self._secrets[transfer_id] = transfer.secret
            if len(self._secrets) > MAX_KNOWN_SECRETS:
                self._secrets.popitem(last=False)
        return transfer.secret

    def release(self, transfer_id: str) -> IncomingTransfer | None:
        """The barrier of IncomingTransfer.release. The caller must see to it that `announce` is called on the event
        loop with the transfer returned; None: unknown, or at its end already."""
        with self._lock:
            transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            transfer.release()
        return transfer

    # The event loop.

    def channel_opened(self, channel: Channel, layout: KvLayout) -> None:
        """layout: in which its sender's blocks come."""
        self._by_channel[channel] = set()
        self._layouts[channel] = layout

    def channel_lost(self, channel: Channel, error: BatonError) -> None:
        """However it ended: its transfers fail with `error`, its slots go into quarantine."""
        transfers = self._by_channel.pop(channel, set())
        self._layouts.pop(channel, None)
        self._ring.fence(channel, self._clock())
        for transfer in transfers:
            self._fail(transfer, error, IncomingState.EXPIRED)
        self._grant()

    def knows(self, transfer_id: str, secret: bytes) -> bool:
        """Whether that reservation was made here with that secret, lately: it may have ended since."""
        with self._lock:
            known = self._secrets.get(transfer_id)
        return known is not None and hmac.compare_digest(known, secret)

    def handshake_refused(self) -> None:
        self._refused_handshakes += 1

    def on_frame(self, channel: Channel, frame: SenderFrame | None) -> None:
        match frame:
            case SlotWritten():
                self._on_written(channel, frame)
            case RequestSlots():
                self._on_request(channel, frame)
            case ReturnSlots():
                self._on_returned(channel, frame)
            case OpenTransfer():
                self._on_open(channel, frame)
            case CommitTransfer():
                self._on_commit(channel, frame)
            case AbortTransfer():
                self._on_abort(channel, frame)
            case Heartbeat():
                self._port.send(channel, Heartbeat())
            case _:
                self._dropped[Dropped.MALFORMED] += 1

    def landed(self, job: LandingJob, landing: Landing) -> None:
        written, transfer = job.written, job.transfer
        if landing is Landing.LATE:
            self._dropped[Dropped.LATE] += 1
        else:
            accepted = landing is Landing.ACCEPTED
            self._pieces_landed += accepted
            self._pieces_rejected += not accepted
            self._bytes_landed += written.num_bytes if accepted else 0
            self._port.send(job.channel, SlotLanded(written.transfer_id, written.grant, accepted))
        if landing is Landing.REFUSED and transfer.state is IncomingState.RECEIVING and job.channel in self._by_channel:
            again = self._ring.grant_again(written.grant)
            self._port.send(job.channel, GrantSlots(written.transfer_id, (again,)))
        else:
            self._ring.end_landing(written.grant)
        self._announce_if_ended(transfer)
        self._grant()

    def tick(self) -> None:
        """Deadlines of transfers, end of quarantines, senders that don't give back."""
        now = self._clock()
        self._ring.end_quarantine(now - self._lease_s)
        for channel in self._ring.overdue(now - 2 * self._lease_s):
            message = "slots of ended transfers were not returned in time"
            self._port.end_channel(channel, BatonError(ErrorKind.LEASE_LOST, message))
        for transfer in self._snapshot():
            if transfer.deadline <= now:
                phase = "nobody sent its KV" if transfer.state is IncomingState.RESERVED else "its KV was not complete"
                message = f"transfer {transfer.transfer_id}: {phase} by the deadline"
                self._fail(transfer, BatonError(ErrorKind.DEADLINE_EXCEEDED, message), IncomingState.EXPIRED)
        self._grant()

    def fail(self, transfer_id: str, error: BatonError) -> None:
        if (transfer := self._transfers.get(transfer_id)) is not None:
            self._fail(transfer, error, IncomingState.ABORTED)

    def fail_all(self, error: BatonError) -> None:
        for transfer in self._snapshot():
            self._fail(transfer, error, IncomingState.ABORTED)

    def announce(self, transfer: IncomingTransfer) -> None:
        """The transfer has ended and is out of the table: tell the sender, take its place in the queue away, count."""
        self._by_channel.get(transfer.channel, set()).discard(transfer)
        self._ring.withdraw(transfer, self._clock())
        self._ended[transfer.state] += 1
        if transfer.error is not None:
            self._failed[transfer.error.kind] += 1
        if transfer.channel is not None:
            ended = Committed(transfer.transfer_id)
            failed = transfer.error and TransferEnded(transfer.transfer_id, transfer.error)
            self._port.send(transfer.channel, failed or ended)

    @property
    def num_slots_out(self) -> int:
        """Slots that some sender may still write."""
        return self._ring.count(SlotState.GRANTED)

    def stats(self) -> ReceiverStats:
        return ReceiverStats(
            ended=dict(self._ended),
            failed=dict(self._failed),
            dropped_frames=dict(self._dropped),
            refused_handshakes=self._refused_handshakes,
            pieces_landed=self._pieces_landed,
            pieces_rejected=self._pieces_rejected,
            bytes_landed=self._bytes_landed,
            open_transfers=len(self._transfers),
            num_channels=len(self._by_channel),
            slots={state.value: self._ring.count(state) for state in SlotState},
        )

    def _on_open(self, channel: Channel, frame: OpenTransfer) -> None:
        transfer = self._transfers.get(frame.transfer_id)
        if transfer is None:
            self._refuse(channel, frame, Dropped.UNKNOWN_TRANSFER)
            return
        if not transfer.accepts_secret(frame.secret):
            self._refuse(channel, frame, Dropped.WRONG_SECRET)
            return
        if not transfer.open(channel, self._layouts[channel], frame.expected_bytes):
            if transfer.channel == channel:
                self._dropped[Dropped.DUPLICATE] += 1
            else:
                self._refuse(channel, frame, Dropped.LATE)
            return
        self._by_channel[channel].add(transfer)
        self._announce_if_ended(transfer)

    def _refuse(self, channel: Channel, frame: OpenTransfer, reason: Dropped) -> None:
        """One answer, whatever the reason: a stranger learns nothing, an honest sender came too late."""
        self._dropped[reason] += 1
        message = f"no reservation {frame.transfer_id} for this secret: expired, given up, or never made"
        self._port.send(channel, TransferEnded(frame.transfer_id, BatonError(ErrorKind.LEASE_LOST, message)))

    def _on_request(self, channel: Channel, frame: RequestSlots) -> None:
        if (transfer := self._find(channel, frame.transfer_id)) is not None:
            self._ring.request(channel, transfer, frame.total_slots)
            self._grant()

    def _on_written(self, channel: Channel, written: SlotWritten) -> None:
        transfer = self._ring.begin_landing(channel, written.grant)
        if transfer is None:
            self._dropped[Dropped.STALE_SLOT] += 1
            return
        if is_final(transfer.state):
            self._dropped[Dropped.LATE] += 1
        elif written.transfer_id == transfer.transfer_id and self._claim(transfer, written):
            self._port.land(LandingJob(channel, transfer, written))
            return
        else:
            self._dropped[Dropped.BAD_PIECE] += 1
            message = f"transfer {transfer.transfer_id}: {written.piece} of {written.num_bytes} bytes can't be"
            self._fail(transfer, BatonError(ErrorKind.CORRUPT_KV, message), IncomingState.ABORTED)
        self._ring.end_landing(written.grant)
        self._grant()

    def _claim(self, transfer: IncomingTransfer, written: SlotWritten) -> bool:
        return written.num_bytes <= self._slot_bytes and transfer.claim(written)

    def _on_returned(self, channel: Channel, frame: ReturnSlots) -> None:
        for grant in frame.grants:
            if not self._ring.take_back(channel, grant):
                self._dropped[Dropped.STALE_SLOT] += 1
        self._grant()

    def _on_commit(self, channel: Channel, frame: CommitTransfer) -> None:
        if (transfer := self._find(channel, frame.transfer_id)) is not None:
            if not transfer.set_manifest(frame):
                self._dropped[Dropped.DUPLICATE] += 1
            self._announce_if_ended(transfer)

    def _on_abort(self, channel: Channel, frame: AbortTransfer) -> None:
        if (transfer := self._find(channel, frame.transfer_id)) is not None:
            self._fail(transfer, frame.error, IncomingState.ABORTED)

    def _find(self, channel: Channel, transfer_id: str) -> IncomingTransfer | None:
        """The transfer, if this channel opened it and it has not ended; else the frame is counted as dropped."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.channel != channel:
            self._dropped[Dropped.UNKNOWN_TRANSFER] += 1
            return None
        return transfer

    def _fail(self, transfer: IncomingTransfer, error: BatonError, state: IncomingState) -> None:
        transfer.fail(error, state)
        self._announce_if_ended(transfer)

    def _announce_if_ended(self, transfer: IncomingTransfer) -> None:
        if not is_final(transfer.state):
            return
        with self._lock:
            mine = self._transfers.get(transfer.transfer_id) is transfer
            if mine:
                del self._transfers[transfer.transfer_id]
        if mine:
            self.announce(transfer)

    def _grant(self) -> None:
        self._port.slots_freed()
        for transfer, grants in self._ring.grant().items():
            self._port.send(transfer.channel, GrantSlots(transfer.transfer_id, tuple(grants)))

    def _snapshot(self) -> Iterable[IncomingTransfer]:
        with self._lock:
            return list(self._transfers.values())
