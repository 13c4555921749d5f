"""All workers of the cluster: one session each, following the registry; what placement and readiness are asked of."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from common.registry import Role, WorkerRecord
from common.telemetry import get_logger
from router.cluster.worker_session import DEFAULT_SILENCE_S, SessionEvent, WorkerSession

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Member:
    session: WorkerSession
    task: asyncio.Task[None]


class Fleet:
    """Owns the sessions and their tasks. All methods belong to the event loop.

    clock: monotonic seconds. silence_s: after which a worker counts as lost.
    """

    def __init__(self, router_id: str, clock: Callable[[], float], silence_s: float = DEFAULT_SILENCE_S) -> None:
        self._silence_s = silence_s
        self._router_id = router_id
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._was_complete = False
        self._had_decode = False
        self._last_decode_at = -inf
        # Of workers that are gone; a counter must not fall when one leaves.
        self._late_frames_of_gone = 0
        self._events_of_gone: Counter[tuple[Role, SessionEvent]] = Counter()

    def apply_records(self, records: Mapping[str, WorkerRecord]) -> None:
        """Follow the registry: new incarnations are dialled, replaced ones dropped.

        A worker that is connected outlives its record: the session is the better evidence, and an emptied Redis must
        not empty the fleet.
        """
        for worker_id, record in records.items():
            member = self._members.get(worker_id)
            if member is not None and _same_incarnation(member.session.record, record):
                if member.session.record != record:
                    member.session.record = record
                    self._notify()
                continue
            if member is not None:
                _log.info("worker restarted", worker_id=worker_id, old_epoch=member.session.record.epoch)
                self._drop(worker_id)
            self._add(record)
        for worker_id in [w for w, m in self._members.items() if w not in records and not m.session.ready]:
            _log.info("worker gone", worker_id=worker_id)
            self._drop(worker_id)

    def sessions(self, role: Role | None = None) -> list[WorkerSession]:
        """Of all known workers, connected or not."""
        return [m.session for m in self._members.values() if role is None or m.session.record.role == role]

    def usable(self, role: Role) -> list[WorkerSession]:
        """Those that may take new work: connected and not draining."""
        return [s for s in self.sessions(role) if s.accepting]

    def session(self, worker_id: str) -> WorkerSession | None:
        member = self._members.get(worker_id)
        return None if member is None else member.session

    @property
    def ready(self) -> bool:
        """Whether requests should come: decode is there, and so is prefill, if such a worker exists.

        The second half holds only until the first time it is met. Afterwards a prefill worker that registers, or is
        lost, changes nothing: the decode workers compute prompts meanwhile.
        """
        if not self.usable("decode"):
            return False
        if not self._was_complete:
            self._was_complete = bool(self.usable("prefill") or not self.sessions("prefill"))
        return self._was_complete

    @property
    def without_decode_s(self) -> float:
        """For how long no decode worker has been usable: 0 where one is, infinite before the first."""
        if self.usable("decode"):
            return 0.0
        return 0.0 if self._had_decode else self._clock() - self._last_decode_at

    @property
    def num_late_frames(self) -> int:
        """Frames for transfers that this router had let go of, since the start."""
        return self._late_frames_of_gone + sum(s.num_late_frames for s in self.sessions())

    @property
    def session_events(self) -> Mapping[tuple[Role, SessionEvent], int]:
        """How often sessions came up and broke, since the start; zeros left out. The end of one that the registry
        drops is a loss, too.
        """
        events = Counter(self._events_of_gone)
        for session in self.sessions():
            _add_events(events, session)
        return events

    async def wait_changed(self, timeout_s: float) -> None:
        """Returns at the next change of any worker's state, or after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """End every session; their requests hear of it as of a loss."""
        for worker_id in list(self._members):
            self._drop(worker_id)
        await _wait_all(self._ending)

    def _add(self, record: WorkerRecord) -> None:
        session = WorkerSession(record, self._router_id, self._notify, self._clock, self._silence_s)
        task = asyncio.create_task(session.run(), name=f"session {record.worker_id}")
        self._members[record.worker_id] = _Member(session, task)
        self._notify()

    def _drop(self, worker_id: str) -> None:
        member = self._members.pop(worker_id)
        member.session.close()
        self._late_frames_of_gone += member.session.num_late_frames
        _add_events(self._events_of_gone, member.session)
        member.task.cancel()
        self._ending.add(member.task)
        member.task.add_done_callback(self._ending.discard)
        self._notify()

    def _notify(self) -> None:
        has_decode = bool(self.usable("decode"))
        if self._had_decode and not has_decode:
            self._last_decode_at = self._clock()
        self._had_decode = has_decode
        # Whoever waits holds the old event; who comes later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


def _add_events(total: Counter[tuple[Role, SessionEvent]], session: WorkerSession) -> None:
    for event, number in session.num_events.items():
        total[session.record.role, event] += number


def _same_incarnation(known: WorkerRecord, record: WorkerRecord) -> bool:
    return (known.epoch, known.grpc_address, known.role) == (record.epoch, record.grpc_address, record.role)


async def _wait_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
