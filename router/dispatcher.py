"""Who is in flight: starts requests, bounds their number, numbers their transfers, and ends them all at shutdown."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from common.errors import BatonError, ErrorKind
from router.placer import Placer
from router.request import RequestRun
from router.request_record import RequestRecord
from router.request_state import RUNNING, WAITING
from router.spec import GenerationSpec


class RequestObserver(Protocol):
    """Told of requests' turns; the metrics are one."""

    def on_retry(self, reason: ErrorKind) -> None: ...

    def on_end(self, record: RequestRecord) -> None: ...


class Dispatcher:
    """Owns every RequestRun from `submit` to its end.

    transfer_prefix: random, one a router process; with a counter behind it no transfer_id is ever used twice.
    clock: monotonic seconds, of the same origin as the event loop's.
    """

    def __init__(
        self,
        placer: Placer,
        observer: RequestObserver,
        max_in_flight: int,
        transfer_prefix: str,
        clock: Callable[[], float],
    ) -> None:
        self.placer = placer
        self.clock = clock
        self._observer = observer
        self._max_in_flight = max_in_flight
        self._transfer_prefix = transfer_prefix
        self._counter = itertools.count()
        self._in_flight: set[RequestRun] = set()
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

    def check_room(self, num_requests: int = 1) -> None:
        """Raises what `submit` would raise for so many requests, before work is put into them."""
        if self._refusal is not None:
            raise self._refusal
        if len(self._in_flight) + num_requests > self._max_in_flight:
            message = f"{len(self._in_flight)} requests are in flight and {self._max_in_flight} are allowed; try later"
            raise BatonError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)

    def submit(self, spec: GenerationSpec, notify: Callable[[], None]) -> RequestRun:
        """Start a request. Raises OVERLOADED or DRAINING. `notify`: see RequestRun."""
        self.check_room()
        run = RequestRun(spec, self, notify)
        self._in_flight.add(run)
        self._emptied.clear()
        run.start()
        return run

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

    def on_end(self, run: RequestRun, record: RequestRecord) -> None:
        self._in_flight.discard(run)
        if not self._in_flight:
            self._emptied.set()
        self._observer.on_end(record)
