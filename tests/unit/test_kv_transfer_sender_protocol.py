"""The sender's side of one channel, frame by frame."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import BatonError, ErrorKind
from kv_transfer.frames import (
    AbortTransfer,
    Committed,
    CommitTransfer,
    GrantSlots,
    Manifest,
    OpenTransfer,
    RequestSlots,
    ReturnSlots,
    SlotGrant,
    SlotLanded,
    SlotWritten,
    TransferEnded,
)
from kv_transfer.outgoing import Outgoing, PieceJob
from kv_transfer.pieces import plan_geometry
from kv_transfer.sender_protocol import SenderProtocol, SenderTotals
from kv_transfer.staging_pool import StagingPool
from kv_transfer.stats import Dropped
from kv_transfer.types import Handoff, SenderCallbacks, TransferStats, TransferTarget, WorkerIdentity
from tests.kv_fakes import SMALL

UNIT = SMALL.block_bytes
SLOT_BYTES = 3 * UNIT  # one block in all three layers
HANDOFF = Handoff(8, 3)


class Bench:
    """Implements SenderPort: notes what is asked of it."""

    def __init__(self, num_staging: int = 4, welcome: bool = True) -> None:
        self.sent: list[Any] = []
        self.transmitted: list[PieceJob] = []
        self.put_again: list[PieceJob] = []
        self.broken: list[BatonError] = []
        self.gathered: list[int] = []
        self.ends: list[Any] = []
        self.now = 0.0
        self.pool = StagingPool(num_staging, max_held=num_staging)
        self.totals = SenderTotals()
        self.protocol = SenderProtocol(self, self.pool, self.totals, lambda: self.now)
        if welcome:
            self.welcome()

    def welcome(self, *, direct: bool = False) -> None:
        self.protocol.welcome(plan_geometry(SMALL, SLOT_BYTES), 8, direct=direct)

    def send(self, frame: Any) -> None:
        self.sent.append(frame)

    def transmit(self, job: PieceJob) -> None:
        self.transmitted.append(job)

    def put(self, job: PieceJob) -> None:
        self.put_again.append(job)

    def break_off(self, error: BatonError) -> None:
        self.broken.append(error)

    def job_ended(self) -> None:
        pass

    def open(self, num_blocks: int, transfer_id: str = "t") -> Outgoing:
        target = TransferTarget("", WorkerIdentity("d", "e"), b"secret", 0)
        callbacks = SenderCallbacks(self.gathered.append, self.ends.append)
        transfer = Outgoing(transfer_id, target, num_blocks, callbacks, deadline=10.0)
        self.protocol.add(transfer)
        return transfer

    def grant(self, *grants: tuple[int, int], transfer_id: str = "t") -> None:
        self.protocol.on_frame(GrantSlots(transfer_id, tuple(SlotGrant(*grant) for grant in grants)))

    def finish(self, job: PieceJob, checksum: int = 9) -> None:
        self.protocol.gathered(job, checksum)
        self.protocol.put_done(job, None)

    def take_sent(self) -> list[Any]:
        sent, self.sent = self.sent, []
        return sent


def test_a_transfer_from_open_to_commit() -> None:
    bench = Bench()
    transfer = bench.open(2)
    assert bench.take_sent() == [OpenTransfer("t", b"secret", 2 * SLOT_BYTES)]
    bench.protocol.push(transfer, (5, 6))
    assert bench.take_sent() == [RequestSlots("t", 2)]
    bench.grant((0, 1), (1, 1))
    first, second = bench.transmitted
    assert transfer.ids_of(first.piece) == [5]
    bench.finish(first, 7)
    bench.protocol.commit(transfer, HANDOFF)
    written = bench.take_sent()
    assert written == [SlotWritten("t", SlotGrant(0, 1), first.piece, SLOT_BYTES, 7)]
    bench.finish(second, (1 << 64) - 3)
    written, commit = bench.take_sent()
    assert isinstance(commit, CommitTransfer)
    # The sum of checksums wraps at 64 bits.
    assert commit.manifest == Manifest(num_pieces=2, num_bytes=2 * SLOT_BYTES, checksum_sum=4)
    bench.protocol.on_frame(SlotLanded("t", SlotGrant(0, 1), True))
    bench.protocol.on_frame(SlotLanded("t", SlotGrant(1, 1), True))
    bench.protocol.on_frame(Committed("t"))
    (stats,) = bench.ends
    assert stats == TransferStats(0.0, 2 * SLOT_BYTES)
    assert bench.gathered == [1, 2]
    assert bench.pool.num_free == 4
    assert bench.protocol.is_idle


def test_nothing_to_send_is_opened_and_committed_at_once() -> None:
    bench = Bench()
    transfer = bench.open(0)
    bench.protocol.commit(transfer, HANDOFF)
    assert [type(frame) for frame in bench.take_sent()] == [OpenTransfer, CommitTransfer]


def test_what_happens_before_welcome_is_made_up_for() -> None:
    bench = Bench(welcome=False)
    transfer = bench.open(1)
    bench.protocol.push(transfer, (5,))
    bench.protocol.commit(transfer, HANDOFF)
    assert bench.sent == []
    bench.welcome()
    assert [type(frame) for frame in bench.take_sent()] == [OpenTransfer, RequestSlots]


def test_what_is_aborted_before_welcome_is_told_after_it() -> None:
    bench = Bench(welcome=False)
    transfer = bench.open(1)
    error = BatonError(ErrorKind.CANCELLED, "x")
    bench.protocol.abort(transfer, error)
    assert bench.ends == [error]
    bench.welcome()
    assert bench.take_sent() == [OpenTransfer("t", b"secret", SLOT_BYTES), AbortTransfer("t", error)]


def test_a_grant_told_twice_is_used_once() -> None:
    bench = Bench()
    transfer = bench.open(3)
    bench.protocol.push(transfer, (1, 2, 3))
    bench.grant((0, 4))
    bench.grant((0, 4))
    bench.grant((0, 3))
    bench.grant((99, 1))
    assert len(bench.transmitted) == 1
    assert bench.totals.dropped[Dropped.STALE_SLOT] == 3


def test_grants_without_work_or_without_a_transfer_are_returned() -> None:
    bench = Bench()
    transfer = bench.open(2)
    bench.protocol.push(transfer, (1,))
    bench.grant((0, 1), (1, 1))
    bench.grant((2, 1), transfer_id="unknown")
    returned = [frame for frame in bench.sent if isinstance(frame, ReturnSlots)]
    assert returned == [ReturnSlots("t", (SlotGrant(1, 1),)), ReturnSlots("unknown", (SlotGrant(2, 1),))]


def test_an_abort_returns_unused_slots_at_once_and_the_one_being_put_when_the_put_is_done() -> None:
    bench = Bench(num_staging=1)
    transfer = bench.open(3)
    bench.protocol.push(transfer, (1, 2, 3))
    bench.grant((0, 1), (1, 1))
    (job,) = bench.transmitted
    bench.take_sent()
    error = BatonError(ErrorKind.CANCELLED, "x")
    bench.protocol.abort(transfer, error)
    assert bench.take_sent() == [AbortTransfer("t", error), ReturnSlots("t", (SlotGrant(1, 1),))]
    assert bench.ends == []  # its gather is under way
    bench.protocol.gathered(job, 9)
    assert bench.ends == [error]
    assert bench.gathered == []
    assert bench.pool.num_free == 0  # its put is
    bench.protocol.put_done(job, None)
    assert bench.take_sent() == [ReturnSlots("t", (SlotGrant(0, 1),))]
    assert bench.pool.num_free == 1
    assert bench.protocol.is_idle


def test_the_receivers_end_is_the_end() -> None:
    bench = Bench()
    transfer = bench.open(2)
    bench.protocol.push(transfer, (1, 2))
    bench.grant((0, 1))
    bench.finish(bench.transmitted[0])
    bench.take_sent()
    error = BatonError(ErrorKind.CANCELLED, "aborted there")
    bench.protocol.on_frame(TransferEnded("t", error))
    bench.protocol.on_frame(TransferEnded("t", error))
    assert bench.ends == [error]
    assert bench.pool.num_free == 4
    # SlotWritten was its answer for the slot: nothing to return, no abort to send.
    assert bench.take_sent() == []
    bench.protocol.push(transfer, (3,))
    bench.protocol.commit(transfer, HANDOFF)
    bench.protocol.abort(transfer, error)
    assert bench.take_sent() == []
    assert bench.ends == [error]


def test_a_refused_piece_is_put_again_from_staging_without_being_read_again() -> None:
    bench = Bench()
    transfer = bench.open(1)
    bench.protocol.push(transfer, (1,))
    bench.protocol.commit(transfer, HANDOFF)
    bench.grant((0, 1))
    (job,) = bench.transmitted
    bench.finish(job)
    bench.take_sent()
    bench.protocol.on_frame(SlotLanded("t", SlotGrant(0, 1), False))
    bench.grant((0, 2))
    assert bench.put_again == [job]
    assert len(bench.transmitted) == 1
    bench.protocol.put_done(job, None)
    assert bench.take_sent() == [SlotWritten("t", SlotGrant(0, 2), job.piece, SLOT_BYTES, 9)]
    bench.protocol.on_frame(Committed("t"))
    assert bench.ends[0].num_bytes == 2 * SLOT_BYTES
    assert bench.totals.pieces_resent == 1


def test_refused_pieces_do_not_wait_behind_transfers_that_lack_staging_slots() -> None:
    bench = Bench(num_staging=1)
    first, second = bench.open(1, "first"), bench.open(1, "second")
    bench.protocol.push(first, (1,))
    bench.protocol.push(second, (2,))
    bench.grant((0, 1), transfer_id="first")
    bench.finish(bench.transmitted[0])
    bench.grant((1, 1), transfer_id="second")
    assert len(bench.transmitted) == 1  # no staging slot for the second
    bench.protocol.on_frame(SlotLanded("first", SlotGrant(0, 1), False))
    bench.grant((0, 2), transfer_id="first")
    assert bench.put_again == [bench.transmitted[0]]
    bench.protocol.put_done(bench.put_again[0], None)
    bench.protocol.on_frame(SlotLanded("first", SlotGrant(0, 2), True))
    assert len(bench.transmitted) == 2


def test_a_failed_put_fails_the_transfer_and_breaks_the_channel_off() -> None:
    bench = Bench()
    transfer = bench.open(2)
    bench.protocol.push(transfer, (1, 2))
    bench.grant((0, 1), (1, 1))
    bench.protocol.gathered(bench.transmitted[0], 1)
    error = BatonError(ErrorKind.LEASE_LOST, "put failed")
    bench.protocol.put_done(bench.transmitted[0], error)
    assert bench.broken == [error]
    bench.protocol.lost(error)
    assert bench.ends == []
    bench.finish(bench.transmitted[1])
    assert bench.ends == [error]
    assert bench.pool.num_free == 4


def test_a_failed_gather_fails_its_transfer_only() -> None:
    bench = Bench()
    transfer, other = bench.open(1), bench.open(1, "other")
    bench.protocol.push(transfer, (1,))
    bench.grant((0, 1))
    bench.take_sent()
    error = BatonError(ErrorKind.INTERNAL, "no such block")
    bench.protocol.gather_failed(bench.transmitted[0], error)
    assert bench.ends == [error]
    assert bench.take_sent() == [ReturnSlots("t", (SlotGrant(0, 1),)), AbortTransfer("t", error)]
    assert not other.is_ended
    assert bench.pool.num_free == 4


def test_the_deadline_ends_a_transfer() -> None:
    bench = Bench()
    bench.open(1)
    bench.now = 9.9
    bench.protocol.tick()
    assert bench.ends == []
    bench.now = 10.0
    bench.protocol.tick()
    assert bench.ends[0].kind is ErrorKind.DEADLINE_EXCEEDED
    assert isinstance(bench.sent[-1], AbortTransfer)


@pytest.mark.parametrize("misuse", ["push too many", "commit too early", "same id"])
def test_misuse_fails_the_transfer_and_says_how(misuse: str) -> None:
    bench = Bench()
    transfer = bench.open(2)
    match misuse:
        case "push too many":
            bench.protocol.push(transfer, (1, 2, 3))
        case "commit too early":
            bench.protocol.push(transfer, (1,))
            bench.protocol.commit(transfer, HANDOFF)
        case "same id":
            bench.open(2)
    (error,) = bench.ends
    assert error.kind is ErrorKind.INTERNAL
    assert "t" in error.message


def test_frames_about_what_is_gone_are_counted_and_dropped() -> None:
    bench = Bench()
    bench.protocol.on_frame(SlotLanded("gone", SlotGrant(0, 1), True))
    bench.protocol.on_frame(Committed("gone"))
    bench.protocol.on_frame(TransferEnded("gone", BatonError(ErrorKind.CANCELLED, "x")))
    bench.protocol.on_frame(None)
    bench.open(1)
    bench.protocol.on_frame(SlotLanded("t", SlotGrant(0, 1), True))
    assert bench.totals.dropped == {Dropped.LATE: 2, Dropped.MALFORMED: 1, Dropped.DUPLICATE: 1}
    assert bench.ends == []


def test_a_callback_that_raises_harms_nobody() -> None:
    bench = Bench()

    def broken(_: object) -> None:
        raise RuntimeError("callback")

    target = TransferTarget("", WorkerIdentity("d", "e"), b"secret", 0)
    bench.protocol.add(Outgoing("t", target, 1, SenderCallbacks(broken, broken), deadline=10.0))
    bench.protocol.lost(BatonError(ErrorKind.LEASE_LOST, "x"))
    assert bench.protocol.is_idle


def test_a_piece_gathered_into_the_ring_itself_is_read_again_when_refused_and_told_as_gathered_when_accepted() -> None:
    bench = Bench(num_staging=0, welcome=False)
    bench.welcome(direct=True)
    transfer = bench.open(1)
    bench.protocol.push(transfer, (5,))
    bench.grant((0, 1))
    (job,) = bench.transmitted
    assert job.staging_slot is None
    bench.finish(job)
    bench.protocol.on_frame(SlotLanded("t", SlotGrant(0, 1), False))
    bench.grant((0, 2))
    assert bench.transmitted == [job, job]
    assert bench.put_again == []
    bench.protocol.commit(transfer, HANDOFF)
    bench.finish(job)
    assert bench.gathered == []
    bench.protocol.on_frame(SlotLanded("t", SlotGrant(0, 2), True))
    assert bench.gathered == [1]
    bench.protocol.on_frame(Committed("t"))
    assert isinstance(bench.ends[0], TransferStats)
    assert bench.protocol.is_idle


def test_an_aborted_transfer_s_end_waits_for_a_second_gather_into_the_ring() -> None:
    bench = Bench(num_staging=0, welcome=False)
    bench.welcome(direct=True)
    transfer = bench.open(1)
    bench.protocol.push(transfer, (5,))
    bench.grant((0, 1))
    (job,) = bench.transmitted
    bench.finish(job)
    bench.protocol.on_frame(SlotLanded("t", SlotGrant(0, 1), False))
    bench.grant((0, 2))
    bench.protocol.abort(transfer, BatonError(ErrorKind.CANCELLED, "enough"))
    assert bench.ends == []
    bench.take_sent()
    bench.finish(job)
    assert len(bench.ends) == 1
    assert bench.take_sent() == [ReturnSlots("t", (SlotGrant(0, 2),))]
    assert bench.protocol.is_idle
