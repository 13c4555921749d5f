"""Virtual time: events run in order of their time, at no other speed than the computer's."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """now: seconds. Events of the same time run in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), event))

    def run(self) -> None:
        """Until no event is left."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
