"""Senders, a receiver, and everything that can happen between them, chosen by hypothesis: frames delayed, dropped,
repeated, swapped; bytes spoiled, or written long after their sender was given up; aborts from either side; channels
cut; senders crashed; senders whose blocks are of another shape than the receiver's. The protocols are the product's
own; threads, sockets and clocks are this file's.

What must hold: a commit means the very bytes; blocks that were given back are never touched again; every transfer ends
exactly once on each side that lives to see it; all slots, staging memory and tables return to their start.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.errors import BatonError, ErrorKind
from common.kvcache.layout import KvLayout
from kv_transfer.frames import ReceiverFrame, SenderFrame
from kv_transfer.outgoing import Outgoing, PieceJob
from kv_transfer.pieces import plan_geometry
from kv_transfer.receiver_protocol import LandingJob, ReceiverProtocol
from kv_transfer.sender_protocol import SenderProtocol, SenderTotals
from kv_transfer.staging_pool import StagingPool
from kv_transfer.types import (
    Handoff,
    ReceiverCallbacks,
    SenderCallbacks,
    TransferStats,
    TransferTarget,
    WorkerIdentity,
)
from tests.kv_fakes import SMALL, NumpyKvStore

SLOT_BYTES = 4 * SMALL.block_bytes  # one block over all three layers, and a remainder
NUM_SLOTS, NUM_STAGING, LEASE_S, TIMEOUT_S = 4, 3, 2.0, 30.0
NUM_BLOCKS = 96
# In which senders hold their KV: as the receiver does, in larger blocks, in smaller ones with more heads.
SHAPES = [SMALL, KvLayout(3, 8, 2, 8, "float32"), KvLayout(3, 2, 4, 8, "float32")]


def tokens_of(store: NumpyKvStore, block_ids: list[int], num_tokens: int) -> bytes:
    """What the blocks hold of the first num_tokens, in the receiver's heads, whatever the store's shape."""
    blocks = store.by_token()[:, block_ids][:, :, :, : SMALL.num_kv_heads]
    by_token = blocks.transpose(0, 1, 4, 2, 3, 5)
    return by_token.reshape(SMALL.num_layers, -1, *by_token.shape[3:])[:, :num_tokens].tobytes()


@dataclass(eq=False, repr=False)
class Record:
    """A transfer as its two owners see it. source: what its blocks held when they were pushed."""

    transfer_id: str
    sender: Sender
    source_ids: list[int]
    target_ids: list[int]
    source: bytes
    outgoing: Outgoing | None = None
    pushed: int = 0
    committing: bool = False
    sender_ends: list[Any] = field(default_factory=list)
    receiver_ends: list[Any] = field(default_factory=list)
    released: bool = False
    # What the target blocks held when they were given back.
    given_back: bytes | None = None

    @property
    def handoff(self) -> Handoff:
        return Handoff(len(self.source_ids) * self.sender.layout.block_size, 5)


class Channel:
    """Frames under way, each direction in order unless a rule says otherwise."""

    def __init__(self) -> None:
        self.to_receiver: deque[SenderFrame] = deque()
        self.to_sender: deque[ReceiverFrame] = deque()
        self.receiver_open = True


class Sender:
    """One incarnation of a prefill worker: implements SenderPort. Owns its store, staging memory, and blocks."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.layout = SHAPES[seed % len(SHAPES)]
        self.store = NumpyKvStore(self.layout, NUM_BLOCKS, seed)
        self.free_blocks = list(range(NUM_BLOCKS))
        self.staging = np.zeros(NUM_STAGING * SLOT_BYTES, np.uint8)
        self.pool = StagingPool(NUM_STAGING, max_held=2)
        self.totals = SenderTotals()
        self.gathers: deque[PieceJob] = deque()
        self.puts: deque[PieceJob] = deque()
        self.alive = True
        self.connect()

    def connect(self) -> None:
        self.channel = Channel()
        self.breaking: BatonError | None = None
        self.protocol = SenderProtocol(self, self.pool, self.totals, lambda: self.world.now)
        self.world.channels.append(self.channel)
        self.world.receiver.channel_opened(self.channel, self.layout)
        self.protocol.welcome(plan_geometry(self.layout, SLOT_BYTES), NUM_SLOTS)

    def send(self, frame: SenderFrame) -> None:
        self.channel.to_receiver.append(frame)

    def transmit(self, job: PieceJob) -> None:
        self.gathers.append(job)

    def put(self, job: PieceJob) -> None:
        self.puts.append(job)

    def break_off(self, error: BatonError) -> None:
        self.breaking = error

    def job_ended(self) -> None:
        pass

    def run_gather(self) -> None:
        job = self.gathers.popleft()
        record = self.world.records[job.transfer.transfer_id]
        assert not record.sender_ends, "blocks are read after their transfer's end was told"
        data = self._staged(job)
        ids = job.transfer.ids_of(job.piece)
        checksum = self.store.gather(job.piece.first_layer, job.piece.num_layers, ids, data)
        self.owner_of(job).gathered(job, checksum)
        self.puts.append(job)

    def run_put(self, fails: bool = False, tell: bool = True) -> None:
        """fails: the transport reports an error, though the bytes may have arrived."""
        job = self.puts.popleft()
        start = job.grant.slot * SLOT_BYTES
        slot = self.world.landing[start : start + job.num_bytes]
        slot[:] = self._staged(job)
        if self.world.spoil_next:
            self.world.spoil_next -= 1
            slot[job.num_bytes // 2] ^= 0x10
        if tell and self.alive:
            error = BatonError(ErrorKind.LEASE_LOST, "put failed") if fails else None
            self.owner_of(job).put_done(job, error)

    def owner_of(self, job: PieceJob) -> SenderProtocol:
        return self.world.protocols[job.transfer]

    def _staged(self, job: PieceJob) -> Any:
        start = job.staging_slot * SLOT_BYTES
        return self.staging[start : start + job.num_bytes]

    def lose(self, error: BatonError) -> None:
        """The channel is gone, as this side sees it; another is opened at once."""
        protocol = self.protocol
        protocol.lost(error)
        self.channel.to_sender.clear()
        self.world.unseen_losses.append(self.channel)
        self.connect()


class World:
    """Implements ReceiverPort; owns the receiver's blocks, the landing memory and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.landing = np.zeros(NUM_SLOTS * SLOT_BYTES, np.uint8)
        self.store = NumpyKvStore(SMALL, NUM_BLOCKS)
        self.free_blocks = list(range(NUM_BLOCKS))
        self.channels: list[Channel] = []
        self.unseen_losses: list[Channel] = []
        self.ending: list[tuple[Channel, BatonError]] = []
        self.landings: deque[LandingJob] = deque()
        self.releases: deque[Any] = deque()
        self.records: dict[str, Record] = {}
        self.protocols: dict[Outgoing, SenderProtocol] = {}
        self.receiver = ReceiverProtocol(
            self,
            self.store,
            num_slots=NUM_SLOTS,
            slot_bytes=SLOT_BYTES,
            max_held_slots=2,
            lease_s=LEASE_S,
            clock=lambda: self.now,
        )
        # So many of the next puts deliver a wrong byte.
        self.spoil_next = 0
        self.senders = [Sender(self, 1), Sender(self, 2)]
        self.ghosts: list[Sender] = []

    def send(self, channel: Any, frame: ReceiverFrame) -> None:
        if channel.receiver_open:
            channel.to_sender.append(frame)

    def land(self, job: LandingJob) -> None:
        self.landings.append(job)

    def end_channel(self, channel: Any, error: BatonError) -> None:
        self.ending.append((channel, error))

    def slots_freed(self) -> None:
        pass

    def run_landing(self) -> None:
        job = self.landings.popleft()
        start = job.written.grant.slot * SLOT_BYTES
        landing = job.transfer.land(job.written, self.landing[start : start + job.written.num_bytes])
        self.receiver.landed(job, landing)

    def lose(self, channel: Channel) -> None:
        """The receiver learns that a channel is gone."""
        if channel.receiver_open:
            channel.receiver_open = False
            channel.to_receiver.clear()
            self.receiver.channel_lost(channel, BatonError(ErrorKind.LEASE_LOST, "channel lost"))
        for sender in self.senders:
            if sender.channel is channel and sender.breaking is None:
                sender.breaking = BatonError(ErrorKind.LEASE_LOST, "channel lost")

    def give_back(self, record: Record) -> None:
        """The receiver's blocks are the pool's again; here they rest, so that a late write would show."""
        record.given_back = self.store.blocks(record.target_ids)

    def housekeeping(self) -> None:
        """What the services do as soon as the protocols ask for it."""
        for channel, _ in self.ending:
            self.lose(channel)
        self.ending.clear()
        for sender in self.senders:
            if sender.breaking is not None:
                sender.lose(sender.breaking)

    def open(self, sender: Sender, num_blocks: int, right_secret: bool) -> None:
        transfer_id = f"t{len(self.records)}"
        sources = [sender.free_blocks.pop() for _ in range(num_blocks)]
        num_tokens = num_blocks * sender.layout.block_size
        targets = [self.free_blocks.pop() for _ in range(-(-num_tokens // SMALL.block_size))]
        record = Record(transfer_id, sender, sources, targets, tokens_of(sender.store, sources, num_tokens))
        self.records[transfer_id] = record

        def on_commit(handoff: Handoff, _: TransferStats) -> None:
            assert handoff == Handoff(num_tokens, 5)
            assert tokens_of(self.store, targets, num_tokens) == record.source, (
                "committed, and not the bytes that were sent"
            )
            record.receiver_ends.append(handoff)
            self.give_back(record)

        def on_fail(error: BatonError) -> None:
            record.receiver_ends.append(error)
            self.give_back(record)

        def on_gathered(count: int) -> None:
            sender.store.data[:, sources[:count]] = 0xAA

        def on_end(result: TransferStats | BatonError) -> None:
            record.sender_ends.append(result)
            sender.store.data[:, sources] = 0xBB

        secret = self.receiver.reserve(transfer_id, targets, 0, ReceiverCallbacks(on_commit, on_fail), TIMEOUT_S)
        target = TransferTarget("", WorkerIdentity("d", "e"), secret if right_secret else b"guess" * 3, 0)
        callbacks = SenderCallbacks(on_gathered, on_end)
        record.outgoing = Outgoing(transfer_id, target, num_blocks, callbacks, self.now + TIMEOUT_S)
        self.protocols[record.outgoing] = sender.protocol
        sender.protocol.add(record.outgoing)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.receiver.tick()
        for sender in self.senders:
            sender.protocol.tick()
        self.housekeeping()

    def settle(self) -> None:
        """Everything that is under way arrives."""
        for _ in range(10_000):
            if not self.settle_one():
                return
        raise AssertionError("the protocols never come to rest")

    def settle_one(self) -> bool:
        self.housekeeping()
        while self.releases:
            self.receiver.announce(self.releases.popleft())
        if self.unseen_losses:
            self.lose(self.unseen_losses.pop())
            return True
        for sender in self.senders:
            if sender.channel.to_receiver and sender.channel.receiver_open:
                self.receiver.on_frame(sender.channel, sender.channel.to_receiver.popleft())
                return True
            if sender.channel.to_sender:
                sender.protocol.on_frame(sender.channel.to_sender.popleft())
                return True
            if sender.gathers:
                sender.run_gather()
                return True
            if sender.puts:
                sender.run_put()
                return True
        if self.landings:
            self.run_landing()
            return True
        return False


INDEX = st.integers(0, 1)


class Simulation(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = World()

    def pick(self, data: st.DataObject) -> Record | None:
        live = [r for r in self.world.records.values() if r.sender.alive and not r.sender_ends]
        return data.draw(st.sampled_from(live)) if live else None

    def done(self) -> None:
        self.world.housekeeping()

    @rule(index=INDEX, num_blocks=st.integers(0, 4), right_secret=st.sampled_from([True, True, True, False]))
    def open(self, index: int, num_blocks: int, right_secret: bool) -> None:
        sender = self.world.senders[index]
        if len(sender.free_blocks) >= num_blocks and len(self.world.free_blocks) >= 2 * num_blocks:
            self.world.open(sender, num_blocks, right_secret)

    @rule(index=INDEX)
    def a_whole_transfer(self, index: int) -> None:
        self.open_push_and_commit(index)

    def open_push_and_commit(self, index: int) -> None:
        sender = self.world.senders[index]
        if len(sender.free_blocks) < 3 or len(self.world.free_blocks) < 6:
            return
        self.world.open(sender, 3, right_secret=True)
        record = list(self.world.records.values())[-1]
        assert record.outgoing is not None
        sender.protocol.push(record.outgoing, tuple(record.source_ids))
        sender.protocol.commit(record.outgoing, record.handoff)
        record.pushed, record.committing = 3, True

    @rule(data=st.data(), count=st.integers(1, 3))
    def push(self, data: st.DataObject, count: int) -> None:
        if (record := self.pick(data)) is not None and record.outgoing is not None:
            ids = record.source_ids[record.pushed : record.pushed + count]
            record.pushed += len(ids)
            self.world.protocols[record.outgoing].push(record.outgoing, tuple(ids))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        record = self.pick(data)
        if record is not None and record.outgoing is not None and record.pushed == len(record.source_ids):
            record.committing = True
            self.world.protocols[record.outgoing].commit(record.outgoing, record.handoff)

    @rule(data=st.data())
    def sender_aborts(self, data: st.DataObject) -> None:
        if (record := self.pick(data)) is not None and record.outgoing is not None:
            error = BatonError(ErrorKind.CANCELLED, "given up")
            self.world.protocols[record.outgoing].abort(record.outgoing, error)
            self.done()

    @rule(data=st.data())
    def receiver_releases(self, data: st.DataObject) -> None:
        live = [r for r in self.world.records.values() if not r.receiver_ends and not r.released]
        if live:
            record = data.draw(st.sampled_from(live))
            transfer = self.world.receiver.release(record.transfer_id)
            assert transfer is not None
            record.released = True
            self.world.give_back(record)
            # The event loop hears of it later.
            self.world.releases.append(transfer)

    @rule()
    def announce_release(self) -> None:
        if self.world.releases:
            self.world.receiver.announce(self.world.releases.popleft())

    @rule(index=INDEX, count=st.integers(1, 4))
    def deliver_to_receiver(self, index: int, count: int) -> None:
        channel = self.world.senders[index].channel
        for _ in range(count):
            if channel.to_receiver and channel.receiver_open:
                self.world.receiver.on_frame(channel, channel.to_receiver.popleft())
        self.done()

    @rule(index=INDEX, count=st.integers(1, 4))
    def deliver_to_sender(self, index: int, count: int) -> None:
        sender = self.world.senders[index]
        for _ in range(count):
            if sender.channel.to_sender:
                sender.protocol.on_frame(sender.channel.to_sender.popleft())
        self.done()

    @rule(index=INDEX, to_receiver=st.booleans(), what=st.sampled_from(["drop", "repeat", "swap"]))
    def disturb(self, index: int, to_receiver: bool, what: str) -> None:
        channel = self.world.senders[index].channel
        frames: deque[Any] = channel.to_receiver if to_receiver else channel.to_sender
        if what == "drop" and frames:
            frames.popleft()
        elif what == "repeat" and frames:
            frames.append(frames[0])
        elif what == "swap" and len(frames) > 1:
            frames[0], frames[1] = frames[1], frames[0]

    @rule(index=INDEX)
    def gather(self, index: int) -> None:
        if self.world.senders[index].gathers:
            self.world.senders[index].run_gather()

    @rule(index=INDEX)
    def put(self, index: int) -> None:
        if self.world.senders[index].puts:
            self.world.senders[index].run_put()
            self.done()

    @rule(count=st.integers(1, 4))
    def spoil(self, count: int) -> None:
        self.world.spoil_next = count

    @rule(count=st.integers(1, 60))
    def things_go_on(self, count: int) -> None:
        for _ in range(count):
            self.world.settle_one()

    @rule(index=INDEX, count=st.integers(1, 30))
    def things_go_on_after_a_new_transfer(self, index: int, count: int) -> None:
        self.open_push_and_commit(index)
        self.things_go_on(count)

    @rule(index=INDEX)
    def put_fails(self, index: int) -> None:
        if self.world.senders[index].puts:
            self.world.senders[index].run_put(fails=True)
            self.done()

    @rule()
    def land(self) -> None:
        if self.world.landings:
            self.world.run_landing()

    @rule(index=INDEX)
    def cut_channel_sender_first(self, index: int) -> None:
        self.world.senders[index].lose(BatonError(ErrorKind.LEASE_LOST, "cut"))

    @rule(index=INDEX)
    def cut_channel_receiver_first(self, index: int) -> None:
        self.world.lose(self.world.senders[index].channel)

    @rule()
    def receiver_sees_a_cut(self) -> None:
        if self.world.unseen_losses:
            self.world.lose(self.world.unseen_losses.pop())

    @rule(index=INDEX)
    def crash_sender(self, index: int) -> None:
        dead = self.world.senders[index]
        dead.alive = False
        self.world.unseen_losses.append(dead.channel)
        self.world.ghosts.append(dead)
        self.world.senders[index] = Sender(self.world, len(self.world.ghosts) + 2)

    @rule(data=st.data())
    def a_dead_senders_put_arrives(self, data: st.DataObject) -> None:
        ghosts = [ghost for ghost in self.world.ghosts if ghost.puts]
        if ghosts:
            data.draw(st.sampled_from(ghosts)).run_put(tell=False)

    @rule(seconds=st.sampled_from([0.3, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @invariant()
    def blocks_given_back_stay_as_they_are(self) -> None:
        for record in self.world.records.values():
            if record.given_back is not None:
                assert self.world.store.blocks(record.target_ids) == record.given_back

    @invariant()
    def each_side_ends_at_most_once(self) -> None:
        for record in self.world.records.values():
            assert len(record.sender_ends) <= 1
            assert len(record.receiver_ends) + record.released <= 1
            if record.sender_ends and isinstance(record.sender_ends[0], TransferStats):
                assert isinstance(record.receiver_ends[0], Handoff), "the sender was told of a commit that was none"

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        world.settle()
        # Frames may have been dropped: whoever still waits does so until its deadline.
        for _ in range(40):
            world.tick(1.0)
            world.settle()
        self.blocks_given_back_stay_as_they_are()
        for record in world.records.values():
            assert len(record.receiver_ends) + record.released == 1, f"{record.transfer_id} never ended at the receiver"
            assert len(record.sender_ends) == (1 if record.sender.alive else len(record.sender_ends))
        stats = world.receiver.stats()
        assert stats.slots == {"free": NUM_SLOTS, "granted": 0, "landing": 0, "quarantined": 0}
        assert stats.open_transfers == 0
        for sender in world.senders:
            assert sender.pool.num_free == NUM_STAGING
            assert sender.protocol.is_idle


Simulation.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestSimulation = Simulation.TestCase


def test_an_undisturbed_transfer_commits_and_tells_both_sides() -> None:
    world = World()
    for sender in world.senders:
        for _ in range(6):
            world.open(sender, 4, right_secret=True)
    for record in world.records.values():
        assert record.outgoing is not None
        for block in record.source_ids:
            record.sender.protocol.push(record.outgoing, (block,))
        record.sender.protocol.commit(record.outgoing, record.handoff)
    world.settle()
    for record in world.records.values():
        assert isinstance(record.sender_ends[0], TransferStats)
        assert record.receiver_ends == [record.handoff]


def test_a_wrong_secret_is_refused_and_leaves_the_reservation_alone() -> None:
    world = World()
    world.open(world.senders[0], 2, right_secret=False)
    world.settle()
    (record,) = world.records.values()
    assert record.sender_ends[0].kind is ErrorKind.LEASE_LOST
    assert record.receiver_ends == []
    assert world.receiver.stats().dropped_frames == {"wrong_secret": 1}


def test_a_released_transfer_whose_channel_is_lost_meanwhile_is_granted_nothing() -> None:
    world = World()
    world.open(world.senders[0], 3, right_secret=True)
    (record,) = world.records.values()
    assert record.outgoing is not None
    world.senders[0].protocol.push(record.outgoing, tuple(record.source_ids))
    channel = world.senders[0].channel
    world.receiver.on_frame(channel, channel.to_receiver.popleft())
    world.receiver.on_frame(channel, channel.to_receiver.popleft())
    released = world.receiver.release(record.transfer_id)
    assert released is not None
    world.lose(channel)
    world.tick(LEASE_S)
    world.receiver.announce(released)
    assert world.receiver.stats().slots["free"] == NUM_SLOTS


def test_transfers_without_kv_at_hand_hold_no_slots() -> None:
    """Else those that wait for their computation would starve the one whose blocks they need."""
    world = World()
    for _ in range(10):
        world.open(world.senders[0], 4, right_secret=True)
    world.settle()
    assert world.receiver.stats().slots["granted"] == 0
    last = list(world.records.values())[-1]
    assert last.outgoing is not None
    world.senders[0].protocol.push(last.outgoing, tuple(last.source_ids))
    world.senders[0].protocol.commit(last.outgoing, last.handoff)
    world.settle()
    assert isinstance(last.sender_ends[0], TransferStats)
