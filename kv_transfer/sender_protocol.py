"""What a sender does on one channel: opens transfers, asks for slots, fills them, resends, commits. No I/O.

    push ─► cut ─ grant + staging slot ─► GATHERING ─► PUTTING ─► WRITTEN ── landed, accepted ─► done
                                              ▲           ▲          │ refused
                                              └─ direct ──┴─ grant ─ REFUSED

Direct: the ring is mapped here, and a piece is gathered into its granted slot. There is no staging slot and no put; a
refused piece is gathered again, so its blocks count as gathered only once it is accepted.

Every slot granted is answered once: SlotWritten when its put is complete, or ReturnSlots when no put will touch it.
All of it belongs to one event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from common.errors import BatonError, ErrorKind
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
    SlotGrant,
    SlotLanded,
    SlotWritten,
    TransferEnded,
)
from kv_transfer.outgoing import JobPhase, Outgoing, PieceJob
from kv_transfer.pieces import PieceGeometry
from kv_transfer.staging_pool import StagingPool
from kv_transfer.state import OutgoingState
from kv_transfer.stats import Dropped
from kv_transfer.types import Handoff


class SenderPort(Protocol):
    """What the protocol needs done."""

    def send(self, frame: SenderFrame) -> None:
        """Without waiting; dropped if the channel is gone."""

    def transmit(self, job: PieceJob) -> None:
        """In another thread: gather the piece into its staging slot and take the checksum; call `gathered` on the event
        loop; then put() it. A job without a staging slot: gather into the granted slot; call `gathered`, then
        `put_done`. If the gather fails, call `gather_failed`, and put nothing."""

    def put(self, job: PieceJob) -> None:
        """Put the staging slot's bytes into the granted slot, then call `put_done` on the event loop."""

    def break_off(self, error: BatonError) -> None:
        """Something is wrong with the channel: end it; `lost` follows."""

    def job_ended(self) -> None:
        """`is_idle` may have become true."""


class SenderTotals:
    """Counters of all channels of a sender."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.pieces_sent = self.pieces_resent = self.bytes_sent = 0


class SenderProtocol:
    """One channel. staging: shared with the other channels."""

    def __init__(
        self, port: SenderPort, staging: StagingPool, totals: SenderTotals, clock: Callable[[], float]
    ) -> None:
        self._port = port
        self._staging = staging
        self._totals = totals
        self._clock = clock
        self._geometry: PieceGeometry | None = None
        # Generation of the last grant seen of each slot: an older or equal one is a repetition.
        self._generations: dict[int, int] = {}
        self._num_slots = 0
        self._direct = False
        self._transfers: dict[str, Outgoing] = {}
        # Given up before the channel was up: the receiver must still hear of it, or it would wait for its deadline.
        self._aborted_early: list[tuple[Outgoing, BatonError]] = []
        self._ready: deque[Outgoing] = deque()
        self._num_jobs = 0
        self._lost = False

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def is_idle(self) -> bool:
        """No transfer, and no gather or put of an ended one."""
        return not self._transfers and self._num_jobs == 0

    # What the owner of transfers asks for.

    def add(self, transfer: Outgoing) -> None:
        if transfer.transfer_id in self._transfers:
            message = f"transfer {transfer.transfer_id} is being sent already"
            self._end(transfer, OutgoingState.FAILED, BatonError(ErrorKind.INTERNAL, message))
            return
        self._transfers[transfer.transfer_id] = transfer
        if self._geometry is not None:
            self._open(transfer, self._geometry)

    def push(self, transfer: Outgoing, block_ids: tuple[int, ...]) -> None:
        if transfer.is_ended or not block_ids:
            return
        if transfer.handoff is not None or len(transfer.block_ids) + len(block_ids) > transfer.expected_num_blocks:
            self._fail(transfer, f"more blocks pushed than the {transfer.expected_num_blocks} expected")
            return
        transfer.add_blocks(block_ids)
        self._request(transfer)
        self._fill()

    def commit(self, transfer: Outgoing, handoff: Handoff) -> None:
        if transfer.is_ended or transfer.handoff is not None:
            return
        if len(transfer.block_ids) != transfer.expected_num_blocks:
            pushed, expected = len(transfer.block_ids), transfer.expected_num_blocks
            self._fail(transfer, f"commit after {pushed} blocks of {expected}")
            return
        transfer.handoff = handoff
        self._commit_if_written(transfer)

    def abort(self, transfer: Outgoing, error: BatonError, state: OutgoingState = OutgoingState.ABORTED) -> None:
        if transfer.is_ended:
            return
        if transfer.state is not OutgoingState.OPENING:
            self._port.send(AbortTransfer(transfer.transfer_id, error))
        else:
            self._aborted_early.append((transfer, error))
        self._end(transfer, state, error)

    def abort_all(self, error: BatonError) -> None:
        for transfer in list(self._transfers.values()):
            self.abort(transfer, error, OutgoingState.FAILED)

    # What the channel reports.

    def welcome(self, geometry: PieceGeometry, num_slots: int, *, direct: bool = False) -> None:
        self._geometry, self._num_slots, self._direct = geometry, num_slots, direct
        for aborted, error in self._aborted_early:
            self._port.send(self._open_frame(aborted, geometry))
            self._port.send(AbortTransfer(aborted.transfer_id, error))
        self._aborted_early.clear()
        for transfer in list(self._transfers.values()):
            self._open(transfer, geometry)

    def on_frame(self, frame: ReceiverFrame | None) -> None:
        match frame:
            case SlotLanded():
                self._on_landed(frame)
            case GrantSlots():
                self._on_grant(frame)
            case Committed(transfer_id):
                self._on_committed(transfer_id)
            case TransferEnded(transfer_id, error):
                self._on_ended(transfer_id, error)
            case Heartbeat():
                pass
            case _:
                self._totals.dropped[Dropped.MALFORMED] += 1

    def gathered(self, job: PieceJob, checksum: int) -> None:
        """The job's blocks were read; its put follows by itself."""
        transfer = job.transfer
        job.phase, job.checksum = JobPhase.PUTTING, checksum
        transfer.gathers_running -= 1
        self._tell_gathered(transfer)
        transfer.tell_end()

    def _tell_gathered(self, transfer: Outgoing) -> None:
        if self._geometry is not None:
            transfer.tell_gathered(self._geometry.num_layers)

    def gather_failed(self, job: PieceJob, error: BatonError) -> None:
        transfer = job.transfer
        transfer.gathers_running -= 1
        self._drop_job(job)
        self._give_back(transfer, (job.grant,))
        self.abort(transfer, error, OutgoingState.FAILED)
        transfer.tell_end()

    def put_done(self, job: PieceJob, error: BatonError | None) -> None:
        transfer = job.transfer
        if error is not None:
            self._drop_job(job)
            self._end(transfer, OutgoingState.FAILED, error)
            self._port.break_off(error)
            return
        if transfer.is_ended:
            self._drop_job(job)
            self._give_back(transfer, (job.grant,))
            return
        job.num_puts += 1
        transfer.bytes_put += job.num_bytes
        self._totals.bytes_sent += job.num_bytes
        if job.num_puts == 1:
            self._totals.pieces_sent += 1
            transfer.manifest = transfer.manifest.plus(job.num_bytes, job.checksum)
        else:
            self._totals.pieces_resent += 1
        job.phase = JobPhase.WRITTEN
        self._port.send(SlotWritten(transfer.transfer_id, job.grant, job.piece, job.num_bytes, job.checksum))
        self._commit_if_written(transfer)

    def lost(self, error: BatonError) -> None:
        """The channel is gone: all transfers fail. Jobs under way still end through gathered and put_done."""
        self._lost = True
        self._aborted_early.clear()
        self._staging.forget(self)
        for transfer in list(self._transfers.values()):
            self._end(transfer, OutgoingState.FAILED, error)

    def tick(self) -> None:
        now = self._clock()
        for transfer in [t for t in self._transfers.values() if t.deadline <= now]:
            message = f"transfer {transfer.transfer_id} was not complete by the deadline ({transfer.state})"
            self.abort(transfer, BatonError(ErrorKind.DEADLINE_EXCEEDED, message), OutgoingState.FAILED)

    # Frames.

    def _on_grant(self, frame: GrantSlots) -> None:
        fresh = tuple(grant for grant in frame.grants if self._is_fresh(grant))
        if len(fresh) < len(frame.grants):
            self._totals.dropped[Dropped.STALE_SLOT] += len(frame.grants) - len(fresh)
        transfer = self._transfers.get(frame.transfer_id)
        if transfer is None:
            self._port.send(ReturnSlots(frame.transfer_id, fresh))
            return
        transfer.grants.extend(fresh)
        transfer.awaited_grants = max(0, transfer.awaited_grants - len(fresh))
        self._ready.append(transfer)
        self._fill()

    def _is_fresh(self, grant: SlotGrant) -> bool:
        if not 0 <= grant.slot < self._num_slots or grant.generation <= self._generations.get(grant.slot, 0):
            return False
        self._generations[grant.slot] = grant.generation
        return True

    def _on_landed(self, frame: SlotLanded) -> None:
        transfer = self._transfers.get(frame.transfer_id)
        job = transfer.jobs.get(frame.grant) if transfer is not None else None
        if transfer is None or job is None or job.phase is not JobPhase.WRITTEN:
            self._totals.dropped[Dropped.LATE if transfer is None else Dropped.DUPLICATE] += 1
            return
        if frame.accepted:
            self._drop_job(job)
            job.phase = JobPhase.ACCEPTED
            self._tell_gathered(transfer)
        else:
            del transfer.jobs[frame.grant]
            job.phase = JobPhase.REFUSED
            transfer.refused.append(job)
            # The receiver grants another slot for it without being asked.
            transfer.awaited_grants += 1
            self._ready.append(transfer)
        self._fill()

    def _on_committed(self, transfer_id: str) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.state is not OutgoingState.COMMITTING:
            self._totals.dropped[Dropped.LATE if transfer is None else Dropped.MALFORMED] += 1
            return
        self._end(transfer, OutgoingState.DONE, None)

    def _on_ended(self, transfer_id: str, error: BatonError) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            # Mostly the answer to our own AbortTransfer.
            return
        self._end(transfer, OutgoingState.FAILED, error)

    # Work.

    def _open(self, transfer: Outgoing, geometry: PieceGeometry) -> None:
        if not transfer.move(OutgoingState.SENDING):
            return
        self._port.send(self._open_frame(transfer, geometry))
        transfer.start_cutting(geometry)
        self._request(transfer)
        self._commit_if_written(transfer)

    def _open_frame(self, transfer: Outgoing, geometry: PieceGeometry) -> OpenTransfer:
        num_bytes = transfer.expected_num_blocks * geometry.num_layers * geometry.block_bytes
        return OpenTransfer(transfer.transfer_id, transfer.target.secret, num_bytes)

    def _request(self, transfer: Outgoing) -> None:
        if transfer.state is OutgoingState.OPENING or (missing := transfer.missing_requests) == 0:
            return
        transfer.requested_total += missing
        transfer.awaited_grants += missing
        self._port.send(RequestSlots(transfer.transfer_id, transfer.requested_total))

    def _fill(self) -> None:
        """Start a job for every grant that has work, one a transfer in turn, as far as staging slots go."""
        if self._lost:
            return
        for transfer in self._ready:
            # These have their staging slots already, and must not wait behind those who have none.
            while transfer.refused and transfer.grants:
                self._put_again(transfer)
        while self._ready:
            transfer = self._ready[0]
            if transfer.is_ended or not transfer.grants:
                self._ready.popleft()
            elif transfer.num_uncut == 0:
                # Pushes were merged into fewer pieces than asked for.
                self._give_back(transfer, tuple(transfer.grants))
                transfer.grants.clear()
            elif not self._start_job(transfer):
                return
            else:
                self._ready.rotate(-1)

    def _start_job(self, transfer: Outgoing) -> bool:
        slot = None if self._direct else self._staging.take(self, self._fill)
        if slot is None and not self._direct:
            return False
        piece = transfer.cutter.cut() if transfer.cutter is not None else None
        if piece is None or self._geometry is None:
            if slot is not None:
                self._staging.give(self, slot)
            return False
        if transfer.started_at is None:
            transfer.started_at = self._clock()
        num_bytes = piece.num_units * self._geometry.block_bytes
        job = PieceJob(transfer, piece, num_bytes, slot, transfer.grants.popleft())
        transfer.jobs[job.grant] = job
        transfer.gathering.append(job)
        transfer.gathers_running += 1
        self._num_jobs += 1
        self._port.transmit(job)
        return True

    def _put_again(self, transfer: Outgoing) -> None:
        job = transfer.refused.popleft()
        job.grant, job.phase = transfer.grants.popleft(), JobPhase.PUTTING
        transfer.jobs[job.grant] = job
        if self._direct:
            job.phase = JobPhase.GATHERING
            transfer.gathers_running += 1
            self._port.transmit(job)
        else:
            self._port.put(job)

    def _commit_if_written(self, transfer: Outgoing) -> None:
        if transfer.handoff is None or transfer.state is not OutgoingState.SENDING or not transfer.all_written:
            return
        transfer.move(OutgoingState.COMMITTING)
        self._port.send(CommitTransfer(transfer.transfer_id, transfer.manifest, transfer.handoff))

    def _fail(self, transfer: Outgoing, what: str) -> None:
        error = BatonError(ErrorKind.INTERNAL, f"transfer {transfer.transfer_id}: {what}")
        self.abort(transfer, error, OutgoingState.FAILED)

    def _end(self, transfer: Outgoing, state: OutgoingState, error: BatonError | None) -> None:
        if not transfer.move(state):
            return
        if self._transfers.get(transfer.transfer_id) is transfer:
            del self._transfers[transfer.transfer_id]
        self._totals.ended[state] += 1
        if error is not None:
            self._totals.failed[error.kind] += 1
        transfer.result = error or transfer.stats(self._clock())
        self._give_back(transfer, tuple(transfer.grants))
        transfer.grants.clear()
        # The receiver gives a written slot's grant no answer any more; gathers and puts under way end by themselves.
        for job in [*transfer.jobs.values(), *transfer.refused]:
            if job.phase in (JobPhase.WRITTEN, JobPhase.REFUSED):
                self._drop_job(job)
        transfer.refused.clear()
        transfer.tell_end()
        self._fill()

    def _drop_job(self, job: PieceJob) -> None:
        if job.transfer.jobs.get(job.grant) is job:
            del job.transfer.jobs[job.grant]
        self._num_jobs -= 1
        self._port.job_ended()
        if job.staging_slot is not None:
            self._staging.give(self, job.staging_slot)

    def _give_back(self, transfer: Outgoing, grants: tuple[SlotGrant, ...]) -> None:
        if grants and not self._lost:
            self._port.send(ReturnSlots(transfer.transfer_id, grants))
