"""Who is in flight: lets requests wait, starts them, bounds and numbers them, and ends them all at shutdown."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError, ErrorKind
from common.telemetry import get_logger
from router.admission import Admission
from router.placer import Placer
from router.request import RequestRun
from router.request_record import RequestRecord
from router.request_state import RUNNING, WAITING
from router.spec import GenerationSpec
from router.tenancy.tenant import ANONYMOUS, Tenant
from router.trials import Trials

_log = get_logger(__name__)


class RequestObserver(Protocol):
    """Told of requests' turns; the metrics are one."""

    def on_retry(self, reason: ErrorKind) -> None: ...

    def on_move(self) -> None: ...

    def on_end(self, record: RequestRecord) -> None: ...


class LeaseHolder(Protocol):
    """router/tenancy/quota.py's Quotas, as far as runs hold leases of it."""

    def hold(self, lease_id: str) -> None: ...

    def release(self, lease_id: str, num_output_tokens: int) -> None: ...


@dataclass(slots=True)
class _Group:
    """The choices of one request: it holds its place and its lease until the last of them has ended."""

    leader: RequestRun
    num_open: int
    num_output_tokens: int = 0


class Dispatcher:
    """Owns every RequestRun from `submit` to its end.

    transfer_prefix: random, one a router process; with a counter behind it no transfer_id is ever used twice.
    clock: monotonic seconds, of the same origin as the event loop's. leases: the tenants' quotas.
    """

    def __init__(
        self,
        placer: Placer,
        observer: RequestObserver,
        admission: Admission[RequestRun],
        transfer_prefix: str,
        clock: Callable[[], float],
        leases: LeaseHolder,
    ) -> None:
        self.placer = placer
        self.clock = clock
        self.admission = admission
        self._observer = observer
        self._leases = leases
        self._transfer_prefix = transfer_prefix
        self._counter = itertools.count()
        self._in_flight: set[RequestRun] = set()
        # Of requests with several choices, by each of their runs.
        self._groups: dict[RequestRun, _Group] = {}
        self._trials = Trials()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._refusal: BatonError | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests that no worker computes yet. Counted, not kept: it can't drift."""
        return sum(run.state in WAITING for run in self._in_flight)

    @property
    def num_running(self) -> int:
        return sum(run.state in RUNNING for run in self._in_flight)

    @property
    def accepting(self) -> bool:
        return self._refusal is None

    def check_room(self, num_requests: int = 1, tenant: Tenant = ANONYMOUS) -> None:
        """Raises what `submit` would raise for so many requests, before work is put into them."""
        if self._refusal is not None:
            raise self._refusal
        self.admission.check_room(len(self._in_flight), num_requests, tenant.name, tenant.weight)

    def submit(self, spec: GenerationSpec, notify: Callable[[], None]) -> RequestRun:
        """Let a request of one choice wait for its turn. Raises OVERLOADED, DEADLINE_UNREACHABLE or DRAINING. `notify`:
        see RequestRun.
        """
        (run,) = self.submit_choices(spec, [notify])
        return run

    def submit_choices(self, spec: GenerationSpec, notifies: Sequence[Callable[[], None]]) -> list[RequestRun]:
        """Likewise one of several choices, which take one turn: a run for each, told of by its own of `notifies`."""
        try:
            self.check_room(spec.num_choices, spec.tenant)
            self.admission.check_deadline(spec)
        except BatonError:
            self._leases.release(spec.lease_id, 0)
            raise
        self._leases.hold(spec.lease_id)
        runs = [RequestRun(each, self, notify) for each, notify in zip(spec.choices(), notifies, strict=True)]
        leader = runs[0]
        if len(runs) > 1:
            leader.adopt(runs[1:])
            self._groups |= dict.fromkeys(runs, _Group(leader, len(runs)))
        self._in_flight.update(runs)
        self._emptied.clear()
        self.admission.enter(leader)
        self._start_next()
        return runs

    def _start_next(self) -> None:
        """Whoever has room now."""
        while (run := self.admission.next()) is not None:
            run.start()

    def find(self, request_id: str) -> list[RequestRun]:
        """Those in flight under the client's id, which need not be unique; oldest first. Looks through all."""
        runs = [run for run in self._in_flight if run.spec.request_id == request_id]
        return sorted(runs, key=lambda run: run.spec.received_at)

    def refuse_new(self, error: BatonError) -> None:
        """From now on every submit raises `error`; what runs goes on."""
        self._refusal = error

    def fail_all(self, error: BatonError) -> None:
        """End whatever still runs."""
        for run in list(self._in_flight):
            run.fail(error)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Whether nothing was in flight any more within timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    # -- for the runs

    def next_transfer_id(self) -> str:
        return f"{self._transfer_prefix}-{next(self._counter)}"

    def on_retry(self, reason: ErrorKind) -> None:
        self._observer.on_retry(reason)

    def on_placed(self, run: RequestRun, num_uncached_tokens: int) -> None:
        self.admission.on_placed(run, num_uncached_tokens)
        self._start_next()

    def on_first_token(self, run: RequestRun) -> None:
        self.admission.on_first_token(run)
        self._start_next()

    def on_output(self, run: RequestRun, num_tokens: int) -> None:
        self.admission.on_output(run, num_tokens)

    def on_move(self) -> None:
        self._observer.on_move()

    def try_alone(self, run: RequestRun) -> None:
        self._trials.enter(run)

    def on_proven(self, run: RequestRun) -> None:
        self._trials.leave(run)

    def on_guilty(self, run: RequestRun, error: BatonError) -> None:
        group = self._groups.get(run)
        mates = [] if group is None else [m for m, its in self._groups.items() if its is group and m is not run]
        _log.error("a request kills workers", request_id=run.spec.request_id, choices=1 + len(mates))
        for each in (*mates, run):  # it last: while it is on trial, none of them is started
            each.fail(error)

    def on_end(self, run: RequestRun, record: RequestRecord) -> None:
        self._in_flight.discard(run)
        self._trials.leave(run)
        group = self._groups.pop(run, None) or _Group(run, 1)
        group.num_open -= 1
        group.num_output_tokens += record.usage.completion_tokens
        if not group.num_open:
            self.admission.leave(group.leader)
            self._leases.release(group.leader.spec.lease_id, group.num_output_tokens)
        self._start_next()
        if not self._in_flight:
            self._emptied.set()
        self._observer.on_end(record)
