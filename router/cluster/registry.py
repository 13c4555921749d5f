"""Which workers exist, as Redis tells it: polls the records that workers keep alive (common/registry.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.registry import WorkerRecord, decode_record, worker_key, workers_key
from common.telemetry import get_logger

POLL_S: Final = 0.5
# Until every role has shown up, or STARTUP_S have passed.
STARTUP_POLL_S: Final = 0.1
STARTUP_S: Final = 30.0
POLL_TIMEOUT_S: Final = 2.0
# A worker id without a record this long is taken out of the set of ids; a worker that lives adds itself again.
FORGET_AFTER_S: Final = 60.0

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What a worker must share with this router to be of use. Prefill workers may have blocks of another size: decode
    workers take their KV in any (docs/decisions/0035); only their prefixes are found in no index then."""

    model_fingerprint: str
    block_size: int

    def mismatch(self, record: WorkerRecord) -> str | None:
        """One line naming the field and both values, or None."""
        fields = ("model_fingerprint",) if record.role == "prefill" else ("model_fingerprint", "block_size")
        for field in fields:
            mine, theirs = getattr(self, field), getattr(record, field)
            if mine != theirs:
                return f"{field}: {mine!r} here, {theirs!r} there"
        return None


class RegistryWatcher:
    """Calls `on_records` with the full set of live records after every successful poll; a failed one calls nothing.

    on_records: worker_id → record, of this model only. clock: monotonic seconds.
    """

    def __init__(
        self,
        redis: Redis,
        cluster: str,
        identity: ModelIdentity,
        on_records: Callable[[Mapping[str, WorkerRecord]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._cluster = cluster
        self._identity = identity
        self._on_records = on_records
        self._clock = clock
        # Of the last successful poll; before it, of the start.
        self.polled_at = clock()
        self.num_failures = 0
        self._reachable = True
        self._complained: dict[str, str] = {}
        self._missing_since: dict[str, float] = {}
        self._roles_seen: set[str] = set()

    async def run(self) -> None:
        """Polls until cancelled, as a task of the router's process."""
        loop = asyncio.get_running_loop()
        startup_ends = loop.time() + STARTUP_S
        while True:
            try:
                await self.poll()
            except Exception:  # without the watcher the fleet would be frozen for good
                _log.exception("registry poll failed")
            starting = len(self._roles_seen) < 2 and loop.time() < startup_ends
            await asyncio.sleep(STARTUP_POLL_S if starting else POLL_S)

    async def poll(self) -> None:
        """One look at Redis. Never raises for Redis' sake."""
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                values = await self._read()
        except (RedisError, OSError, TimeoutError) as error:
            if self._reachable:
                _log.warning("registry unreachable, keeping the last known workers", error=str(error))
            self._reachable = False
            self.num_failures += 1
            return
        if not self._reachable:
            _log.info("registry reachable again")
        self._reachable = True
        self.polled_at = self._clock()
        records = self._decode(values)
        self._roles_seen |= {record.role for record in records.values()}
        self._on_records(records)
        await self._forget_gone(values)

    async def _read(self) -> dict[str, bytes | None]:
        # The client never decodes: values are bytes, whatever redis-py's types allow for.
        members = cast(set[bytes], await self._redis.smembers(workers_key(self._cluster)))
        ids = sorted(member.decode(errors="replace") for member in members)
        if not ids:
            return {}
        values = await self._redis.mget([worker_key(self._cluster, worker_id) for worker_id in ids])
        return dict(zip(ids, cast(list[bytes | None], values), strict=True))

    def _decode(self, values: Mapping[str, bytes | None]) -> dict[str, WorkerRecord]:
        records: dict[str, WorkerRecord] = {}
        complaints: dict[str, str] = {}
        for worker_id, value in values.items():
            if value is None:
                continue
            try:
                record = decode_record(value)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                complaints[worker_id] = f"malformed record: {error}"
                continue
            problem = self._identity.mismatch(record)
            if problem is None and record.worker_id != worker_id:
                problem = f"its record names another worker, {record.worker_id!r}"
            if problem is None:
                records[worker_id] = record
            else:
                complaints[worker_id] = problem
        for worker_id, problem in complaints.items():
            if self._complained.get(worker_id) != problem:
                _log.warning("worker ignored", worker_id=worker_id, reason=problem)
        # Only what is wrong now is remembered: the map is no larger than the registry.
        self._complained = complaints
        return records

    async def _forget_gone(self, values: Mapping[str, bytes | None]) -> None:
        now = asyncio.get_running_loop().time()
        gone = {worker_id for worker_id, value in values.items() if value is None}
        self._missing_since = {worker_id: self._missing_since.get(worker_id, now) for worker_id in gone}
        expired = [w for w, since in self._missing_since.items() if now - since > FORGET_AFTER_S]
        if not expired:
            return
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                await self._redis.srem(workers_key(self._cluster), *expired)
        except (RedisError, OSError, TimeoutError):
            return  # the next poll tries again
        for worker_id in expired:
            del self._missing_since[worker_id]
