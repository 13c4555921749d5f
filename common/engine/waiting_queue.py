"""Who is admitted next: the most urgent class, then the earliest; but nobody is passed over for ever.

rank = (starved first, priority: lower is more urgent, arrival)
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Final, Generic, TypeVar

from common.engine.sequence import Sequence

# So many later ones of more urgent classes may go first; then a sequence is starved, and goes before them.
MAX_OVERTAKEN: Final = 64
S = TypeVar("S", bound=Sequence)


def rank(sequence: Sequence) -> tuple[bool, int, int]:
    """Sorts by claim, the strongest first. Distinct for distinct sequences of one engine."""
    return (sequence.num_overtaken < MAX_OVERTAKEN, sequence.priority, sequence.arrival)


def note_overtaken(by: Sequence, others: Iterable[Sequence]) -> bool:
    """`by` was admitted: those of the others that came before it were passed over. Whether one is starved by now."""
    starved = False
    for other in others:
        if other.arrival < by.arrival:
            other.num_overtaken += 1
            starved = starved or other.num_overtaken == MAX_OVERTAKEN
    return starved


class WaitingQueue(Generic[S]):
    """Sequences in order of rank. Whoever fills it bounds it. O(n) a change, n being who waits."""

    def __init__(self) -> None:
        self._items: list[S] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[S]:
        return iter(self._items)

    @property
    def head(self) -> S:
        """The next one. Raises IndexError where nobody waits."""
        return self._items[0]

    def push(self, sequence: S) -> None:
        insort(self._items, sequence, key=rank)

    def pop(self) -> S:
        """Take the head out: it is admitted, and passes those who came before it."""
        head = self._items.pop(0)
        # Within one class nobody is passed over, and the last is of the least urgent class.
        if self._items and self._items[-1].priority != head.priority and note_overtaken(head, self._items):
            self._items.sort(key=rank)
        return head

    def remove(self, sequence: S) -> None:
        """Raises ValueError where it does not wait."""
        self._items.remove(sequence)
