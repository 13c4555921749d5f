"""Who may write which landing slot: grants, their generations, and fairness among transfers. Pure; one owner, no locks.

                 grant                 SlotWritten             verified
        FREE ───────────► GRANTED ──────────────────► LANDING ──────────► FREE
          ▲                  │  └── ReturnSlots ──► FREE     refused └──► GRANTED
          │                  └── channel lost ──► QUARANTINED
          └──────────────── one lease later ───────────┘

A granted slot is free again only once its sender can no longer be writing it: it said so (SlotWritten after its put was
flushed, or ReturnSlots), or its channel is lost. In the last case nothing can be known: the sender may be alive behind
a broken control connection, with a put still in some queue. The slot then rests for one lease, in which a live sender
closes its endpoint by itself, and every grant has a generation of its own, so that frames about an older grant are
recognised. What remains is a put that arrives even later, into a slot that someone else was granted meanwhile. It can't
spoil KV: the receiver copies the slot into blocks that nobody reads yet, and the checksum that it compares is that of
the very bytes that it copied (native copies hash each vector as they store it), or else is taken of the slot after the
copy: had the late bytes been there before or during the copy, they would still be there. Either way the checksum would
not match the one that the rightful sender declared; the piece is refused and sent again. (In the second case a second
late put would have to restore the very bytes in between.)

Slots are granted on request, round-robin among the transfers that wait, one slot a turn, and no transfer holds more
than its share: neither a long transfer nor one that is stuck can starve the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from kv_transfer.frames import SlotGrant

Channel = Hashable
Owner = TypeVar("Owner", bound=Hashable)


class SlotState(Enum):
    FREE = "free"
    GRANTED = "granted"
    LANDING = "landing"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Slot(Generic[Owner]):
    """channel, owner: of the last grant. since: when its owner withdrew (GRANTED) or its channel was lost."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    channel: Channel = None
    owner: Owner | None = None
    since: float | None = None


@dataclass(slots=True)
class _Claim:
    """wanted: slots asked for and not yet granted. held: granted and not yet free again."""

    channel: Channel
    wanted: int = 0
    held: int = 0
    requested_total: int = 0


class LandingRing(Generic[Owner]):
    """Owner: a transfer. max_held: most slots that one of them holds at a time."""

    def __init__(self, num_slots: int, max_held: int) -> None:
        self._slots: list[_Slot[Owner]] = [_Slot() for _ in range(num_slots)]
        self._free = list(reversed(range(num_slots)))
        self._claims: dict[Owner, _Claim] = {}
        self._queue: OrderedDict[Owner, _Claim] = OrderedDict()
        self._max_held = max_held

    def count(self, state: SlotState) -> int:
        return sum(slot.state is state for slot in self._slots)

    def request(self, channel: Channel, owner: Owner, total: int) -> None:
        """The owner has asked for `total` slots since its start. A repeated or overtaken request changes nothing."""
        claim = self._claims.setdefault(owner, _Claim(channel))
        claim.wanted += max(0, total - claim.requested_total)
        claim.requested_total = max(total, claim.requested_total)
        self._enqueue(owner, claim)

    def withdraw(self, owner: Owner, now: float) -> None:
        """The transfer has ended: it gets no more slots. Those it holds stay its sender's until that says otherwise."""
        self._claims.pop(owner, None)
        self._queue.pop(owner, None)
        for slot in self._slots:
            if slot.state is SlotState.GRANTED and slot.owner is owner:
                slot.since = now

    def grant(self) -> dict[Owner, list[SlotGrant]]:
        """Hand out free slots to those who wait, in turn."""
        grants: dict[Owner, list[SlotGrant]] = {}
        while self._free and self._queue:
            owner, claim = self._queue.popitem(last=False)
            # The slot used last: its bytes are the ones that a cache still holds.
            number = self._free.pop()
            slot = self._slots[number]
            slot.state, slot.generation, slot.since = SlotState.GRANTED, slot.generation + 1, None
            slot.channel, slot.owner = claim.channel, owner
            claim.wanted, claim.held = claim.wanted - 1, claim.held + 1
            grants.setdefault(owner, []).append(SlotGrant(number, slot.generation))
            self._enqueue(owner, claim)
        return grants

    def begin_landing(self, channel: Channel, grant: SlotGrant) -> Owner | None:
        """The sender has written the slot. None: it isn't, or is no longer, its to write."""
        slot = self._find_granted(channel, grant)
        if slot is None:
            return None
        slot.state = SlotState.LANDING
        return slot.owner

    def grant_again(self, grant: SlotGrant) -> SlotGrant:
        """What landed was refused: its owner gets the slot once more, out of turn. (To make it wait for another slot
        could wait for ever: its sender keeps the refused bytes, and those who hold slots may wait for that memory.)"""
        slot = self._slots[grant.slot]
        slot.state, slot.generation = SlotState.GRANTED, slot.generation + 1
        return SlotGrant(grant.slot, slot.generation)

    def end_landing(self, grant: SlotGrant) -> None:
        """The slot's bytes are no longer needed."""
        self._release(grant.slot)

    def take_back(self, channel: Channel, grant: SlotGrant) -> bool:
        """The sender will not write the slot. False: as None for begin_landing."""
        if self._find_granted(channel, grant) is None:
            return False
        self._release(grant.slot)
        return True

    def fence(self, channel: Channel, now: float) -> None:
        """The channel is lost: what its sender may still write goes into quarantine, and it is granted nothing more."""
        for owner in [owner for owner, claim in self._claims.items() if claim.channel == channel]:
            del self._claims[owner]
            self._queue.pop(owner, None)
        for slot in self._slots:
            if slot.state is SlotState.GRANTED and slot.channel == channel:
                slot.state, slot.since = SlotState.QUARANTINED, now

    def end_quarantine(self, before: float) -> None:
        """Free the slots that went into quarantine at or before that moment."""
        for number, slot in enumerate(self._slots):
            if slot.state is SlotState.QUARANTINED and slot.since is not None and slot.since <= before:
                self._release(number)

    def overdue(self, before: float) -> set[Channel]:
        """Channels that still hold slots of transfers that ended at or before that moment."""
        return {
            slot.channel
            for slot in self._slots
            if slot.state is SlotState.GRANTED and slot.since is not None and slot.since <= before
        }

    def _find_granted(self, channel: Channel, grant: SlotGrant) -> _Slot[Owner] | None:
        if not 0 <= grant.slot < len(self._slots):
            return None
        slot = self._slots[grant.slot]
        valid = slot.state is SlotState.GRANTED and slot.channel == channel and slot.generation == grant.generation
        return slot if valid else None

    def _release(self, number: int) -> None:
        slot = self._slots[number]
        owner, slot.owner = slot.owner, None
        slot.state, slot.since = SlotState.FREE, None
        self._free.append(number)
        if owner is not None and (claim := self._claims.get(owner)) is not None:
            claim.held -= 1
            self._enqueue(owner, claim)

    def _enqueue(self, owner: Owner, claim: _Claim) -> None:
        if claim.wanted > 0 and claim.held < self._max_held:
            self._queue.setdefault(owner, claim)
