"""Keeps a worker's registry record and its entries in the prefix index in Redis true. Schema: common/registry.py.

    engine news ──► mirror of the sets ─┬─ net changes ── every ≤ 50 ms ──► numbered batch ───── refused ──► snapshot
                    (BlockTiers)        └─ each renewal: sizes, number equal? ──── no, or a router asks ──► snapshot

Redis may go and come back, empty or not, or fail over to a replica that missed something: the worker keeps serving, and
one bounded snapshot repairs whatever was missed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from enum import StrEnum
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common import redis_client
from common.kvcache.prefix_cache import CacheChanges
from common.redis_client import RedisTimeouts
from common.registry import LEASE_S, RENEW_S, encode_record, reread_key, worker_key, workers_key
from common.tasks import end_task
from common.telemetry import get_logger
from common.worker.block_tiers import BlockTiers
from common.worker.index_writer import IndexWriter, SequenceGapError
from common.worker.info import WorkerInfo

# Together with one round trip: how far the index lags behind the cache.
FLUSH_INTERVAL_S: Final = 0.03
OPERATION_TIMEOUT_S: Final = 1.0
# Routers that find the index wrong can't make a worker do nothing but write it.
MIN_REREAD_INTERVAL_S: Final = 10.0

# Deletes a record only if it is this incarnation's: a successor of the same worker id may have written its own.
_DELETE_IF_EQUAL: Final = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

_log = get_logger(__name__)


class SnapshotReason(StrEnum):
    """Why all entries were written anew. START: there were none. LOST: Redis was away. GAP: it missed a batch.
    AUDIT: the sizes differed. ASKED: a router found them wrong.
    """

    START = "start"
    LOST = "lost"
    GAP = "gap"
    AUDIT = "audit"
    ASKED = "asked"


def connect(url: str) -> Redis:
    """A client whose operations fail within OPERATION_TIMEOUT_S: the publisher has its own way of trying again.

    Raises StartupError for a url that can't be read.
    """
    timeouts = RedisTimeouts(connect_s=OPERATION_TIMEOUT_S, answer_s=OPERATION_TIMEOUT_S, num_retries=0)
    return redis_client.connect(url, timeouts)


class RegistryPublisher:
    """Belongs to the event loop. `start` announces the worker and owns a task until `close`.

    redis: from `connect`; owned by the caller. max_blocks: most hashes that are published; more are left out, counted.
    """

    def __init__(self, redis: Redis, cluster: str, info: WorkerInfo, max_blocks: int) -> None:
        self._redis = redis
        self._info = info
        self._workers_key = workers_key(cluster)
        self._worker_key = worker_key(cluster, info.worker_id)
        self._reread_key = reread_key(cluster, info.worker_id, info.epoch)
        self._writer = IndexWriter(redis, cluster, info.worker_id, info.epoch, _ms(LEASE_S))
        self._tiers = BlockTiers(max_blocks)
        self.num_snapshots: Counter[SnapshotReason] = Counter()
        self._snapshot_due: SnapshotReason | None = SnapshotReason.START
        self._reread_after = float("-inf")
        self._draining = False
        self._last_record = b""
        self._reachable = True
        self._wake = asyncio.Event()
        self._renew_now = False
        self._task: asyncio.Task[None] | None = None

    @property
    def num_indexed_blocks(self) -> int:
        """In any tier, as they are or will soon be in the index."""
        return self._tiers.num_held[0]

    @property
    def num_left_out(self) -> int:
        """Blocks that there was no room for in the index, since the start."""
        return self._tiers.num_left_out

    async def start(self) -> None:
        """The record is in Redis when this returns, unless Redis is away: then it follows as soon as it is back."""
        await self._round(renew=True)
        self._task = asyncio.create_task(self._run(), name="registry-publisher")

    def on_changes(self, changes: CacheChanges) -> None:
        """What the cache stored and evicted; to be called with every change, in order."""
        self._tiers.add(changes)
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
            await self._redis.unlink(*self._writer.keys, self._reread_key)
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
            await self._write()
        except Exception as error:
            # What arrived and what did not is unknown now.
            self._snapshot_due = self._snapshot_due or SnapshotReason.LOST
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
        """Record, membership and all leases; and the audit of what the index holds."""
        self._last_record = encode_record(self._info.record(draining=self._draining))
        sequence, blocks, host_blocks = self._writer.keys
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(self._worker_key, self._last_record, px=_ms(LEASE_S))
        pipe.sadd(self._workers_key, self._info.worker_id)
        for key in self._writer.keys:
            pipe.pexpire(key, _ms(LEASE_S))
        pipe.get(sequence)
        pipe.scard(blocks)
        pipe.scard(host_blocks)
        pipe.execute_command("DEL", self._reread_key)
        *_, number, num_blocks, num_host_blocks, was_asked = await pipe.execute()
        if self._snapshot_due is not None:
            return
        if number is None or int(number) != self._writer.sequence:
            self._snapshot_due = SnapshotReason.GAP
        elif (num_blocks, num_host_blocks) != self._tiers.num_published:
            self._snapshot_due = SnapshotReason.AUDIT
        elif was_asked and asyncio.get_running_loop().time() >= self._reread_after:
            self._snapshot_due = SnapshotReason.ASKED
        if self._snapshot_due is not None:
            about = {"worker_id": self._info.worker_id, "reason": str(self._snapshot_due)}
            _log.warning("block index differs from the cache: writing it anew", **about)

    async def _write(self) -> None:
        """Changes, or everything; changes that come during the writing are pending, and follow."""
        reason = self._snapshot_due
        if reason is None:
            try:
                if self._tiers.has_changes:
                    await self._writer.apply(self._tiers.take_changes())
                return
            except SequenceGapError as error:
                _log.warning("block index has a gap: writing it anew", worker_id=self._info.worker_id, error=str(error))
                reason = SnapshotReason.GAP
        self._snapshot_due = reason  # until it is written
        await self._writer.rewrite(self._tiers.take_all())
        self._snapshot_due = None
        self.num_snapshots[reason] += 1
        self._reread_after = asyncio.get_running_loop().time() + MIN_REREAD_INTERVAL_S


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)
