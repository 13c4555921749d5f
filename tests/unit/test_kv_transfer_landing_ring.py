"""The landing ring: a slot has one writer at a time, none starves, all come back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.frames import SlotGrant
from kv_transfer.landing_ring import LandingRing, SlotState

NUM_SLOTS, MAX_HELD, LEASE_S = 5, 2, 10.0


class RingMachine(RuleBasedStateMachine):
    """Two channels with transfers of their own; the model keeps who may write what."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: LandingRing[str] = LandingRing(NUM_SLOTS, MAX_HELD)
        self.now = 0.0
        self.next_id = 0
        self.live: dict[str, str] = {}
        self.requested: dict[str, int] = {}
        self.granted: dict[str, int] = {}
        # Slots that some sender may write: grant → (channel, transfer).
        self.writers: dict[SlotGrant, tuple[str, str]] = {}
        self.landing: dict[SlotGrant, tuple[str, str]] = {}
        self.quarantined: dict[int, float] = {}
        self.seen: set[SlotGrant] = set()
        self.dead: set[str] = set()

    def _grant(self) -> None:
        for transfer, grants in self.ring.grant().items():
            assert transfer in self.live
            for grant in grants:
                busy = {g.slot for g in (*self.writers, *self.landing)} | set(self.quarantined)
                assert grant.slot not in busy
                assert grant not in self.seen
                self.seen.add(grant)
                self.writers[grant] = (self.live[transfer], transfer)
                self.granted[transfer] += 1

    @rule(channel=st.sampled_from(["a", "b"]))
    def start(self, channel: str) -> None:
        transfer = f"{channel}{self.next_id}"
        self.next_id += 1
        self.live[transfer] = channel
        self.requested[transfer] = self.granted[transfer] = 0

    @rule(data=st.data(), total=st.integers(0, 6))
    def request(self, data: st.DataObject, total: int) -> None:
        if self.live:
            transfer = data.draw(st.sampled_from(sorted(self.live)))
            self.ring.request(self.live[transfer], transfer, total)
            self.requested[transfer] = max(total, self.requested[transfer])
            self._grant()

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        if self.writers:
            grant = data.draw(st.sampled_from(list(self.writers)))
            channel, transfer = self.writers.pop(grant)
            assert self.ring.begin_landing("stranger", grant) is None
            assert self.ring.begin_landing(channel, grant) == transfer
            assert self.ring.begin_landing(channel, grant) is None
            self.landing[grant] = (channel, transfer)

    @rule(data=st.data(), accepted=st.booleans())
    def verify(self, data: st.DataObject, accepted: bool) -> None:
        if self.landing:
            grant = data.draw(st.sampled_from(list(self.landing)))
            channel, transfer = self.landing.pop(grant)
            if not accepted and transfer in self.live and channel not in self.dead:
                again = self.ring.grant_again(grant)
                assert again not in self.seen
                self.seen.add(again)
                self.writers[again] = (channel, transfer)
            else:
                self.ring.end_landing(grant)
                self._grant()

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.writers:
            grant = data.draw(st.sampled_from(list(self.writers)))
            channel, _ = self.writers.pop(grant)
            assert not self.ring.take_back("stranger", grant)
            assert self.ring.take_back(channel, grant)
            assert not self.ring.take_back(channel, grant)
            self._grant()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.live:
            transfer = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[transfer]
            self.ring.withdraw(transfer, self.now)

    @rule(channel=st.sampled_from(["a", "b"]))
    def lose(self, channel: str) -> None:
        self.ring.fence(channel, self.now)
        for grant in [g for g, (owner, _) in self.writers.items() if owner == channel]:
            del self.writers[grant]
            self.quarantined[grant.slot] = self.now
        for transfer in [t for t, owner in self.live.items() if owner == channel]:
            del self.live[transfer]
            self.ring.withdraw(transfer, self.now)
        for grant, (owner, _) in list(self.landing.items()):
            if owner == channel:
                self.ring.end_landing(grant)
                del self.landing[grant]
        self._grant()

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ring.end_quarantine(self.now - LEASE_S)
        self.quarantined = {s: t for s, t in self.quarantined.items() if t > self.now - LEASE_S}
        self._grant()

    @rule(slot=st.integers(-2, 9), generation=st.integers(0, 3))
    def nonsense_changes_nothing(self, slot: int, generation: int) -> None:
        grant = SlotGrant(slot, generation)
        if grant not in self.writers:
            assert self.ring.begin_landing("a", grant) is None
            assert not self.ring.take_back("a", grant)

    @invariant()
    def counts_agree(self) -> None:
        assert self.ring.count(SlotState.GRANTED) == len(self.writers)
        assert self.ring.count(SlotState.LANDING) == len(self.landing)
        assert self.ring.count(SlotState.QUARANTINED) == len(self.quarantined)

    @invariant()
    def no_slot_idles_while_a_transfer_waits_for_it(self) -> None:
        held = {t: sum(owner == t for _, owner in (*self.writers.values(), *self.landing.values())) for t in self.live}
        assert all(count <= MAX_HELD for count in held.values())
        waiting = [t for t in self.live if self.requested[t] > self.granted[t] and held[t] < MAX_HELD]
        assert not waiting or self.ring.count(SlotState.FREE) == 0


RingMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRing = RingMachine.TestCase


def test_free_slots_go_to_the_waiting_transfers_in_turn() -> None:
    ring: LandingRing[str] = LandingRing(num_slots=4, max_held=3)
    ring.request("a", "large", 100)
    ring.request("a", "small", 1)
    assert {owner: len(grants) for owner, grants in ring.grant().items()} == {"large": 3, "small": 1}


def test_a_transfer_at_its_share_does_not_block_those_behind_it() -> None:
    ring: LandingRing[str] = LandingRing(num_slots=4, max_held=2)
    ring.request("a", "first", 100)
    ring.request("b", "second", 100)
    assert {owner: len(grants) for owner, grants in ring.grant().items()} == {"first": 2, "second": 2}
    ring.request("b", "third", 1)
    assert ring.grant() == {}
    assert ring.take_back("a", SlotGrant(0, 1))
    assert list(ring.grant()) == ["third"]


def test_slots_of_an_ended_transfer_are_overdue_until_returned() -> None:
    ring: LandingRing[str] = LandingRing(num_slots=2, max_held=2)
    ring.request("a", "t", 1)
    ((grant,),) = ring.grant().values()
    ring.withdraw("t", now=5.0)
    assert ring.overdue(before=4.9) == set()
    assert ring.overdue(before=5.0) == {"a"}
    assert ring.take_back("a", grant)
    assert ring.overdue(before=9.0) == set()
