"""Staging slots of a sender, shared by all its peers. Pure; one owner, no locks.

A slot is taken to gather a piece and kept until the peer has verified it, so that a refused piece can be sent again
though its blocks are long reused. A peer that is slow, or dead and not yet known to be, holds its slots meanwhile; so
none may hold more than a share.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable

Peer = Hashable


class StagingPool:
    """max_held: most slots that one peer holds at a time."""

    def __init__(self, num_slots: int, max_held: int) -> None:
        self._free = list(range(num_slots))
        self._max_held = max_held
        self._held: Counter[Peer] = Counter()
        self._waiting: OrderedDict[Peer, Callable[[], None]] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, peer: Peer, on_free: Callable[[], None]) -> int | None:
        """A slot. None: not now; `on_free` will be called once when it is worth to ask again."""
        if not self._free or self._held[peer] >= self._max_held:
            self._waiting[peer] = on_free
            return None
        self._held[peer] += 1
        return self._free.pop()

    def give(self, peer: Peer, slot: int) -> None:
        self._free.append(slot)
        self._held[peer] -= 1
        if self._held[peer] == 0:
            del self._held[peer]
        # Who is asked may no longer have use for a slot: then the next is.
        while self._free and (waiter := self._next_waiter()) is not None:
            self._waiting.pop(waiter)()

    def forget(self, peer: Peer) -> None:
        """The peer waits no more."""
        self._waiting.pop(peer, None)

    def _next_waiter(self) -> Peer | None:
        return next((peer for peer in self._waiting if self._held[peer] < self._max_held), None)
