"""The waiting room between gateway and workers: keeps router/policy's fairness and admission supplied with facts.

enter ──► FairQueue ── next: both windows have room, the tenant's KV share too ──► at the workers ── leave
                                                   first token ──► TTFT measured, prefill window given back
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from common.errors import BatonError, ErrorKind, invalid
from router.policy.admission import (
    AtWorkers,
    Backlog,
    Interval,
    Targets,
    Windows,
    adjust,
    fair_limit,
    predicted_ttft_s,
    prefill_has_room,
    retry_after_s,
    running_has_room,
)
from router.policy.fairness import OUTPUT_WEIGHT, FairQueue, Waiting
from router.spec import GenerationSpec
from router.tenancy.tenant import ANONYMOUS

ADJUST_S: Final = 0.5
# After requests of two tenants came so close to each other, windows are as narrow as their isolation needs.
CONTENTION_S: Final = 30.0


class Request(Protocol):
    """What waits; compared by identity."""

    @property
    def spec(self) -> GenerationSpec: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """Usable workers of each phase, and the tokens that the decode workers' KV pools hold together."""

    num_prefill_workers: int
    num_decode_workers: int
    kv_tokens: int


@dataclass(slots=True)
class _Sent:
    """At the workers. prefill_tokens: still to be computed for its first token, 0 once that is there."""

    at: float
    prompt_tokens: int
    prefill_tokens: int
    kv_tokens: int


@dataclass(slots=True)
class _Usage:
    """Of one tenant: requests that wait or run, and KV tokens that the running ones may come to hold."""

    num_requests: int = 0
    num_sent: int = 0
    kv_tokens: int = 0


R = TypeVar("R", bound=Request)


class Admission(Generic[R]):
    """Owned by the dispatcher. max_requests: waiting and running. gaps: seconds and number of all inter-token gaps so
    far. clock: monotonic seconds.
    """

    def __init__(
        self,
        targets: Targets,
        max_requests: int,
        capacity: Callable[[], Capacity],
        gaps: Callable[[], tuple[float, int]],
        clock: Callable[[], float],
    ) -> None:
        self.queue: FairQueue[R] = FairQueue()
        self.windows = Windows()
        self._targets = targets
        self._max_requests = max_requests
        self._capacity = capacity
        self._gaps = gaps
        self._clock = clock
        self._sent: dict[R, _Sent] = {}
        self._usage: dict[str, _Usage] = {}
        self._prefill_tokens = 0
        self._num_prefilling = 0
        self._last_tenant = ""
        self._contended_until = 0.0
        self._served: dict[str, float] = {}
        self._begin_interval(clock())

    # -- before and in the queue

    def check_room(self, num_waiting_and_running: int, num_requests: int, tenant: str, weight: float) -> None:
        """Raises OVERLOADED where so many more of this tenant's would be too many now, INVALID_REQUEST where always."""
        if num_requests > self._max_requests:
            message = f"{num_requests} continuations are asked for at once; this server takes {self._max_requests}"
            raise invalid(f"{message}: ask for fewer prompts, or a smaller `n`", "n")
        free = self._max_requests - num_waiting_and_running
        usage = self._usage.get(tenant)
        own = 0 if usage is None else usage.num_requests
        alone = tenant == ANONYMOUS.name or own == num_waiting_and_running == 0
        limit = self._max_requests if alone else fair_limit(self._max_requests, num_waiting_and_running, weight)
        if num_requests > free or own + num_requests > limit:
            of_whom = "" if alone else f" of tenant {tenant}, which may have {limit} now,"
            number = num_waiting_and_running if alone else own
            message = f"{number} requests{of_whom} are in flight and {self._max_requests} are allowed; try later"
            wait_s = retry_after_s(self.windows, self.queue.waiting_tokens + self._prefill_tokens)
            raise BatonError(ErrorKind.OVERLOADED, message, retry_after_s=wait_s)

    def check_deadline(self, spec: GenerationSpec) -> None:
        """Raises DEADLINE_UNREACHABLE where its first token is not to be expected in time."""
        tenant, num_tokens = spec.tenant, len(spec.prompt_token_ids)
        own = self.queue.waiting_tokens_of(tenant.name)
        others = self.queue.active_weight - (tenant.weight if own else 0.0)
        backlog = Backlog(own, self.queue.waiting_tokens, tenant.weight, others)
        predicted_s = predicted_ttft_s(self.windows, self._at_workers(self._capacity()), backlog, num_tokens)
        left_s = spec.deadline - self._clock()
        if 0 < predicted_s > left_s:
            message = (
                f"the first token is to be expected after {predicted_s:.1f} s, the request's timeout leaves "
                f"{max(0.0, left_s):.1f} s: try again later, or with a longer timeout"
            )
            raise BatonError(ErrorKind.DEADLINE_UNREACHABLE, message, retry_after_s=max(1.0, predicted_s - left_s))

    def enter(self, request: R) -> None:
        """It waits from now on."""
        spec, now = request.spec, self._clock()
        tenant = spec.tenant
        self._usage.setdefault(tenant.name, _Usage()).num_requests += 1
        if tenant.name != self._last_tenant:
            if self._last_tenant:
                self._contended_until = now + CONTENTION_S
            self._last_tenant = tenant.name
        entry: Waiting[R] = Waiting(request, tenant.name, tenant.weight, spec.priority, len(spec.prompt_token_ids), now)
        self.queue.push(entry)

    def next(self) -> R | None:
        """Whose turn it is, from now on counted at the workers; None where nobody waits or nothing has room."""
        if not len(self.queue):
            return None
        now, capacity = self._clock(), self._capacity()
        self._adjust(now, capacity)
        at = self._at_workers(capacity)
        if not running_has_room(self.windows, at):
            self._running_was_limit = True
            return None
        contended = now < self._contended_until

        def may_go(entry: Waiting[R]) -> bool:
            return self._within_kv_share(entry.item.spec, capacity)

        # Whoever is next waits for room; a smaller one behind it does not slip past.
        entry = self.queue.peek(now, may_go)
        if entry is None:
            return None
        if not prefill_has_room(self.windows, at, entry.num_tokens, contended=contended):
            self._prefill_was_limit = True
            return None
        self.queue.take(entry)
        self._note_served(entry.tenant, entry.num_tokens)
        self._send(entry.item, now)
        return entry.item

    # -- at the workers

    def on_placed(self, request: R, num_uncached_tokens: int) -> None:
        """What is cached needs no computing: the window gets it back."""
        sent = self._sent.get(request)
        if sent is not None and sent.prefill_tokens > num_uncached_tokens >= 0:
            self._prefill_tokens -= sent.prefill_tokens - max(1, num_uncached_tokens)
            sent.prefill_tokens = max(1, num_uncached_tokens)

    def on_first_token(self, request: R) -> None:
        sent = self._sent.get(request)
        if sent is None or not sent.prefill_tokens:
            return
        now = self._clock()
        self._ttft_sum_s += now - sent.at
        self._num_first_tokens += 1
        self._prefilled_tokens += sent.prefill_tokens
        self._prefill_is_over(sent, now)

    def on_output(self, request: R, num_tokens: int) -> None:
        tenant = request.spec.tenant
        if tenant is not ANONYMOUS:
            self.queue.charge(tenant.name, OUTPUT_WEIGHT * num_tokens)
            self._note_served(tenant.name, OUTPUT_WEIGHT * num_tokens)

    def leave(self, request: R) -> None:
        """Over, wherever it was. A no-op for what never entered."""
        spec = request.spec
        usage = self._usage.get(spec.tenant.name)
        if usage is None:
            return
        sent = self._sent.pop(request, None)
        if sent is None:
            if not self.queue.remove(request):
                return
        else:
            if sent.prefill_tokens:
                self._prefill_is_over(sent, self._clock())
            usage.kv_tokens -= sent.kv_tokens
            usage.num_sent -= 1
        usage.num_requests -= 1
        if not usage.num_requests:
            del self._usage[spec.tenant.name]

    # -- with other routers

    def take_served(self) -> dict[str, float]:
        """Weighted tokens by tenant that this router served since the last call."""
        served, self._served = self._served, {}
        return served

    def add_served_elsewhere(self, tenant: str, weighted_tokens: float) -> None:
        """Other routers served it: it counts here, too."""
        self.queue.charge(tenant, weighted_tokens)

    # -- own

    def _send(self, request: R, now: float) -> None:
        num_tokens = len(request.spec.prompt_token_ids)
        sent = _Sent(now, num_tokens, max(1, num_tokens), request.spec.max_kv_tokens)
        self._sent[request] = sent
        usage = self._usage[request.spec.tenant.name]
        usage.kv_tokens += sent.kv_tokens
        usage.num_sent += 1
        if not self._num_prefilling:
            self._busy_since = now
        self._num_prefilling += 1
        self._prefill_tokens += sent.prefill_tokens

    def _prefill_is_over(self, sent: _Sent, now: float) -> None:
        self._prefill_tokens -= sent.prefill_tokens
        sent.prefill_tokens = 0
        self._num_prefilling -= 1
        if not self._num_prefilling:
            self._busy_s += now - self._busy_since

    def _within_kv_share(self, spec: GenerationSpec, capacity: Capacity) -> bool:
        share = spec.tenant.kv_share
        usage = self._usage[spec.tenant.name]
        if share >= 1 or not usage.num_sent:
            return True
        return usage.kv_tokens + spec.max_kv_tokens <= share * capacity.kv_tokens

    def _at_workers(self, capacity: Capacity) -> AtWorkers:
        return AtWorkers(
            self._prefill_tokens,
            self._num_prefilling,
            len(self._sent),
            capacity.num_prefill_workers or capacity.num_decode_workers,
            capacity.num_decode_workers,
        )

    def _note_served(self, tenant: str, weighted_tokens: float) -> None:
        if tenant != ANONYMOUS.name:
            self._served[tenant] = self._served.get(tenant, 0.0) + weighted_tokens

    def _adjust(self, now: float, capacity: Capacity) -> None:
        if now - self._interval_began < ADJUST_S:
            return
        if self._num_prefilling:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        gaps_s, num_gaps = self._gaps()
        new_gaps = num_gaps - self._num_gaps_before
        seen = Interval(
            num_first_tokens=self._num_first_tokens,
            mean_ttft_s=self._ttft_sum_s / max(1, self._num_first_tokens),
            num_gaps=new_gaps,
            mean_itl_s=(gaps_s - self._gaps_before_s) / max(1, new_gaps),
            prefilled_tokens=self._prefilled_tokens,
            busy_s=self._busy_s,
            prefill_was_limit=self._prefill_was_limit,
            running_was_limit=self._running_was_limit,
        )
        num_running = len(self._sent) // max(1, capacity.num_decode_workers)
        self.windows = adjust(self.windows, seen, self._targets, num_running)
        self._begin_interval(now)

    def _begin_interval(self, now: float) -> None:
        self._interval_began = self._busy_since = now
        self._gaps_before_s, self._num_gaps_before = self._gaps()
        self._num_first_tokens = self._prefilled_tokens = 0
        self._ttft_sum_s = self._busy_s = 0.0
        self._prefill_was_limit = self._running_was_limit = False
