"""Who is next: priority classes, then virtual token counters among tenants (VTC; Sheng et al., OSDI '24). Pure.

    class    priority − ⌊waited / aging_s⌋, not below 0 or the priority itself: lower goes first. So a request of
             class 3 competes as class 0 after three aging periods.
    counter  service that a tenant had, in weighted tokens divided by its weight: prompt tokens when its request is
             taken, output tokens as they come. Within a class the tenant with the lowest counter goes first.
    slack    counters closer than `slack_tokens` / weight to the lowest count as equal; then the tenant with the least
             work waiting goes first. So who asks for less than its share does not stand in a flood's alternation,
             and the flood loses at most the slack (docs/decisions/0045-fair-queue.md).
    lift     a tenant that comes back from idleness starts at the lowest counter among those that wait, or at that of
             the one who was served last: nobody saves up credit while away.

Why nobody waits for ever: every request reaches class 0 (or better) by aging; there, each take raises a counter by at
least 1 / weight, a newcomer never starts below the lowest waiting counter, and a tenant's counter is kept while it is
away: so of a bounded number of tenants all others are at last more than the slack above the one who waits. Within a
tenant and a class requests go in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

# As the paper: an output token costs a decode step, a prompt token a share of a batch.
INPUT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
DEFAULT_AGING_S: Final = 5.0
DEFAULT_SLACK_TOKENS: Final = 4096.0
# Idle tenants whose counters are remembered.
MAX_IDLE_TENANTS: Final = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """One request in the queue. num_tokens: of its prompt. since: seconds."""

    item: T
    tenant: str
    weight: float
    priority: int
    num_tokens: int
    since: float


@dataclass(slots=True)
class _Tenant(Generic[T]):
    """lines: priority → its requests in order of arrival; only non-empty ones."""

    counter: float
    weight: float
    lines: dict[int, deque[Waiting[T]]] = field(default_factory=dict)
    num_waiting: int = 0
    waiting_tokens: int = 0


class FairQueue(Generic[T]):
    """Owned by one caller, who brings the time. Items are hashable by identity and in the queue once."""

    def __init__(
        self,
        aging_s: float = DEFAULT_AGING_S,
        slack_tokens: float = DEFAULT_SLACK_TOKENS,
        max_idle_tenants: int = MAX_IDLE_TENANTS,
    ) -> None:
        self._aging_s = aging_s
        self._slack_tokens = slack_tokens
        self._max_idle_tenants = max_idle_tenants
        self._active: dict[str, _Tenant[T]] = {}
        self._idle: dict[str, tuple[float, float]] = {}  # counter and weight, the longest away first
        self._entries: dict[T, Waiting[T]] = {}
        self._last_counter = 0.0
        self._waiting_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._waiting_tokens

    @property
    def active_weight(self) -> float:
        """Of the tenants that wait."""
        return sum(tenant.weight for tenant in self._active.values())

    def waiting_tokens_of(self, tenant: str) -> int:
        known = self._active.get(tenant)
        return 0 if known is None else known.waiting_tokens

    def num_by_class(self) -> dict[int, int]:
        """Priority as asked for → requests that wait."""
        counts: dict[int, int] = {}
        for entry in self._entries.values():
            counts[entry.priority] = counts.get(entry.priority, 0) + 1
        return counts

    def push(self, entry: Waiting[T]) -> None:
        """Raises ValueError where the item waits already."""
        if entry.item in self._entries:
            raise ValueError("the item waits already")
        tenant = self._active.get(entry.tenant)
        if tenant is None:
            tenant = self._active[entry.tenant] = _Tenant(self._lifted(entry.tenant), entry.weight)
        tenant.weight = entry.weight
        tenant.lines.setdefault(entry.priority, deque()).append(entry)
        self._account(tenant, entry, 1)
        self._entries[entry.item] = entry

    def remove(self, item: T) -> bool:
        """Whether it waited. Takes time linear in its tenant's line."""
        entry = self._entries.get(item)
        if entry is None:
            return False
        line = self._active[entry.tenant].lines[entry.priority]
        line.remove(entry)
        self._taken_out(entry)
        return True

    def peek(self, now: float, may_go: Callable[[Waiting[T]], bool] = lambda _: True) -> Waiting[T] | None:
        """The next; None where nothing waits or may go.

        may_go: asked for the first of each tenant's lines, in order; a tenant over its share is passed over.
        """
        return next((entry for entry in self._in_order(now) if may_go(entry)), None)

    def take(self, entry: Waiting[T]) -> None:
        """What `peek` returned leaves the queue; its prompt is charged to its tenant."""
        tenant = self._active[entry.tenant]
        self._last_counter = tenant.counter
        tenant.lines[entry.priority].popleft()
        tenant.counter += max(1, entry.num_tokens) * INPUT_WEIGHT / tenant.weight
        self._taken_out(entry)

    def charge(self, tenant: str, weighted_tokens: float) -> None:
        """Service that a tenant had beside the taking of its prompts; a no-op for one that never waited."""
        active = self._active.get(tenant)
        if active is not None:
            active.counter += weighted_tokens / active.weight
        elif tenant in self._idle:
            counter, weight = self._idle[tenant]
            self._idle[tenant] = counter + weighted_tokens / weight, weight

    def counter_of(self, tenant: str) -> float:
        active = self._active.get(tenant)
        return self._idle.get(tenant, (0.0, 1.0))[0] if active is None else active.counter

    def _in_order(self, now: float) -> Iterator[Waiting[T]]:
        """The first of each line of each tenant, best first."""
        heads = [(tenant, line[0]) for tenant in self._active.values() for line in tenant.lines.values()]
        if len(heads) < 2:
            yield from (entry for _, entry in heads)
            return
        lowest = min(tenant.counter for tenant in self._active.values())

        def rank(head: tuple[_Tenant[T], Waiting[T]]) -> tuple[float, ...]:
            tenant, entry = head
            excess = max(0.0, tenant.counter - lowest - self._slack_tokens / tenant.weight)
            return self._class(entry, now), excess, tenant.waiting_tokens / tenant.weight, tenant.counter, entry.since

        for _, entry in sorted(heads, key=rank):
            yield entry

    def _class(self, entry: Waiting[T], now: float) -> int:
        if entry.priority <= 0:
            return entry.priority
        return max(0, entry.priority - int((now - entry.since) / self._aging_s))

    def _lifted(self, name: str) -> float:
        known, _ = self._idle.pop(name, (0.0, 1.0))
        lowest = min((tenant.counter for tenant in self._active.values()), default=self._last_counter)
        return max(known, lowest)

    def _taken_out(self, entry: Waiting[T]) -> None:
        tenant = self._active[entry.tenant]
        if not tenant.lines[entry.priority]:
            del tenant.lines[entry.priority]
        self._account(tenant, entry, -1)
        del self._entries[entry.item]
        if not tenant.num_waiting:
            del self._active[entry.tenant]
            self._idle[entry.tenant] = tenant.counter, tenant.weight
            if len(self._idle) > self._max_idle_tenants:
                del self._idle[next(iter(self._idle))]

    def _account(self, tenant: _Tenant[T], entry: Waiting[T], sign: int) -> None:
        tenant.num_waiting += sign
        tenant.waiting_tokens += sign * entry.num_tokens
        self._waiting_tokens += sign * entry.num_tokens
