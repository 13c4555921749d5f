"""Keeps a worker's registry record and its set of cached block hashes in Redis true. Schema: common/registry.py.

    engine news ──► held: set of hashes ─┬─ pending net changes ── every ≤ 50 ms ──► SADD / SREM
                    (a mirror, exact)    └─ audit at each renewal: SCARD equal? ── no ──► snapshot: DEL, SADD in chunks

Redis may go and come back, empty or not: the worker keeps serving, and one snapshot repairs whatever was missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common.errors import StartupError
from common.kvcache.prefix_cache import CacheChanges, NetChanges
from common.registry import LEASE_S, RENEW_S, blocks_key, encode_record, worker_key, workers_key
from common.tasks import end_task
from common.telemetry import get_logger
from common.worker.info import WorkerInfo

# Together with one round trip: how far the index lags behind the cache.
FLUSH_INTERVAL_S: Final = 0.03
OPERATION_TIMEOUT_S: Final = 1.0
SNAPSHOT_CHUNK: Final = 2000

# Deletes a record only if it is this incarnation's: a successor of the same worker id may have written its own.
_DELETE_IF_EQUAL: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

_log = get_logger(__name__)


def connect(url: str) -> Redis:
    """A client whose operations fail within OPERATION_TIMEOUT_S: the publisher has its own way of trying again.

    Raises StartupError for a url that redis-py can't read.
    """
    try:
        return Redis.from_url(
            url,
            socket_timeout=OPERATION_TIMEOUT_S,
            socket_connect_timeout=OPERATION_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise StartupError(f"redis_url is not understood: {error}; write redis://HOST:6379 or unix:///PATH") from None


class RegistryPublisher:
    """Belongs to the event loop. `start` announces the worker and owns a task until `close`.

    redis: from `connect`; owned by the caller.
    """

    def __init__(self, redis: Redis, cluster: str, info: WorkerInfo) -> None:
        self._redis = redis
        self._info = info
        self._workers_key = workers_key(cluster)
        self._worker_key = worker_key(cluster, info.worker_id)
        self._blocks_key = blocks_key(cluster, info.worker_id, info.epoch)
        self._held: set[bytes] = set()
        self._pending = NetChanges()
        self._snapshot_due = True
        self._draining = False
        self._last_record = b""
        self._reachable = True
        self._wake = asyncio.Event()
        self._renew_now = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The record is in Redis when this returns, unless Redis is away: then it follows as soon as it is back."""
        await self._round(renew=True)
        self._task = asyncio.create_task(self._run(), name="registry-publisher")

    def on_changes(self, changes: CacheChanges) -> None:
        """What the cache stored and evicted; to be called with every change, in order."""
        self._held.difference_update(changes.evicted)
        self._held.update(changes.stored)
        if not self._snapshot_due:
            self._pending.add(changes)
        self._wake.set()

    def drain(self) -> None:
        """Say at once that this worker takes no new requests."""
        self._draining = True
        self._renew_now = True
        self._wake.set()

    async def close(self) -> None:
        """Stop, and take this incarnation's keys out of Redis, if it answers."""
        if self._task is not None:
            await end_task(self._task)
            self._task = None
        try:
            deleted: Any = self._redis.eval(_DELETE_IF_EQUAL, 1, self._worker_key, self._last_record)
            if await deleted:
                await self._redis.srem(self._workers_key, self._info.worker_id)
            await self._redis.delete(self._blocks_key)
        except (RedisError, OSError) as error:
            _log.warning("registry not cleaned up: the lease will expire", error=str(error) or type(error).__name__)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + RENEW_S
        while True:
            try:
                async with asyncio.timeout_at(renew_at):
                    await self._wake.wait()
                    # Gather what the next steps bring: one round trip for all of it.
                    await asyncio.sleep(0 if self._renew_now else FLUSH_INTERVAL_S)
            except TimeoutError:
                pass
            self._wake.clear()
            renew = self._renew_now or loop.time() >= renew_at
            if renew:
                renew_at = loop.time() + RENEW_S
            await self._round(renew=renew)

    async def _round(self, *, renew: bool) -> None:
        """One exchange with Redis; never raises for its sake."""
        if not renew and not self._reachable:
            return
        try:
            if renew:
                self._renew_now = False
                await self._renew()
            if self._snapshot_due:
                await self._write_snapshot()
            else:
                await self._write_changes()
        except Exception as error:
            # What arrived and what did not is unknown now.
            self._snapshot_due = True
            if not isinstance(error, RedisError | OSError):
                _log.exception("registry publisher failed: trying again")
            elif self._reachable:
                reason = str(error) or type(error).__name__
                _log.warning("registry unreachable: serving on, and trying again", error=reason)
            self._reachable = False
            return
        if not self._reachable:
            _log.info("registry reachable again")
        self._reachable = True

    async def _renew(self) -> None:
        """Record, membership and both leases; and the audit of the block set."""
        self._last_record = encode_record(self._info.record(draining=self._draining))
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(self._worker_key, self._last_record, px=_ms(LEASE_S))
        pipe.sadd(self._workers_key, self._info.worker_id)
        pipe.pexpire(self._blocks_key, _ms(LEASE_S))
        pipe.scard(self._blocks_key)
        results = await pipe.execute()
        if not self._snapshot_due and results[-1] != len(self._held) - self._pending.growth:
            _log.warning("block index differs from the cache: writing it anew", worker_id=self._info.worker_id)
            self._snapshot_due = True

    async def _write_changes(self) -> None:
        if not len(self._pending):
            return
        changes = self._pending.take()
        pipe = self._redis.pipeline(transaction=True)
        for chunk in _chunks(changes.evicted):
            pipe.srem(self._blocks_key, *chunk)
        for chunk in _chunks(changes.stored):
            pipe.sadd(self._blocks_key, *chunk)
        # In the same transaction, lest a key that was made anew stays for ever.
        pipe.pexpire(self._blocks_key, _ms(LEASE_S))
        await pipe.execute()

    async def _write_snapshot(self) -> None:
        """What is held now; changes during the writing are pending, and follow."""
        held = list(self._held)
        self._pending.take()
        self._snapshot_due = False
        await self._redis.delete(self._blocks_key)
        for chunk in _chunks(held):
            pipe = self._redis.pipeline(transaction=True)
            pipe.sadd(self._blocks_key, *chunk)
            pipe.pexpire(self._blocks_key, _ms(LEASE_S))
            await pipe.execute()


def _chunks(items: Sequence[bytes]) -> Iterable[list[bytes]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, SNAPSHOT_CHUNK)):
        yield chunk


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)
