"""Tenants' quotas, one for all routers of a cluster: kept in Redis, asked once a request that has a limit.

    acquire ── quota.lua ──► granted, with a lease ── renewed each second ── released at the request's end
                   │ Redis away                            └─ a router that dies: leases run out after LEASE_S
                   └──► this router's own buckets, a share of the quota by the number of routers last seen

A request pays for its prompt when it comes and for its output at its end, which may leave a debt.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from hashlib import sha1
from importlib.resources import files
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from common.errors import BatonError, ErrorKind
from common.telemetry import get_logger
from router.policy.token_bucket import LocalBucket
from router.tenancy.tenant import Tenant

LEASE_S: Final = 10.0
SYNC_S: Final = 1.0
ROUTER_LEASE_S: Final = 5.0
TIMEOUT_S: Final = 0.1
PAUSE_AFTER_FAILURE_S: Final = 0.5
MAX_LOCAL_BUCKETS: Final = 4096

_log = get_logger(__name__)


class Quotas:
    """router_id: random, one a router process. clock: monotonic seconds. `run` is a task of the router."""

    def __init__(self, redis: Redis, cluster: str, router_id: str, clock: Callable[[], float]) -> None:
        self._redis = redis
        self._prefix = f"baton:{{{cluster}}}"
        self._router_id = router_id
        self._clock = clock
        self._script = (files(__package__) / "quota.lua").read_text()
        self._digest = sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._counter = itertools.count()
        self._granted: dict[str, tuple[Tenant, float]] = {}  # with the time; what comes to run holds its lease in time
        self._leases: dict[str, Tenant] = {}  # of what runs
        self._released: dict[str, Tenant] = {}
        self._owed: dict[str, int] = {}  # tenant → output tokens that Redis has not heard of
        self._buckets: dict[str, LocalBucket] = {}
        self._paused_until = float("-inf")
        self.num_routers = 1
        self.num_local = 0

    async def acquire(self, tenant: Tenant, num_tokens: int) -> str:
        """A lease id for `release`; "" where the tenant has no limits. Raises OVER_QUOTA with the time to wait."""
        if not tenant.has_quota:
            return ""
        lease_id = f"{self._router_id}-{next(self._counter)}"
        refusal = await self._ask(tenant, num_tokens, lease_id)
        if refusal is not None:
            wait_s, limit = refusal
            message = f"tenant {tenant.name} is at its limit of {getattr(tenant, limit)} ({limit}); wait {wait_s:.1f} s"
            raise BatonError(ErrorKind.OVER_QUOTA, message, retry_after_s=max(wait_s, 0.001))
        self._granted[lease_id] = tenant, self._clock()
        return lease_id

    def hold(self, lease_id: str) -> None:
        """What it was granted for runs from now on: it is renewed until `release`. A no-op for ""."""
        granted = self._granted.pop(lease_id, None)
        if granted is not None:
            self._leases[lease_id] = granted[0]

    def release(self, lease_id: str, num_output_tokens: int) -> None:
        """The request is over; a no-op for "" and for what is released already."""
        self.hold(lease_id)
        tenant = self._leases.pop(lease_id, None)
        if tenant is None:
            return
        self._released[lease_id] = tenant
        if tenant.tokens_per_minute:
            self._owed[tenant.name] = self._owed.get(tenant.name, 0) + num_output_tokens
        bucket = self._buckets.get(tenant.name)
        if bucket is not None:
            bucket.num_running = max(0, bucket.num_running - 1)
            bucket.tokens -= num_output_tokens

    async def run(self) -> None:
        """Renew leases, tell what was released and used, count the routers; until cancelled."""
        while True:
            await asyncio.sleep(SYNC_S)
            self._drop_unused()
            try:
                async with asyncio.timeout(SYNC_S):
                    await self._sync()
            except (RedisError, OSError, TimeoutError) as error:
                self._pause(error)

    def _drop_unused(self) -> None:
        """Leases whose requests never came to run, such as those of a client that left meanwhile."""
        long_ago = self._clock() - LEASE_S
        for lease_id in [i for i, (_, since) in self._granted.items() if since < long_ago]:
            self.release(lease_id, 0)

    async def close(self) -> None:
        """Give back at once what would else run out by itself."""
        self._released |= self._leases
        self._leases.clear()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._sync()
                await self._redis.zrem(f"{self._prefix}:routers", self._router_id)
        except (RedisError, OSError, TimeoutError):
            return

    async def _ask(self, tenant: Tenant, num_tokens: int, lease_id: str) -> tuple[float, str] | None:
        if self._clock() >= self._paused_until:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    return await self._ask_redis(tenant, num_tokens, lease_id)
            except (RedisError, OSError, TimeoutError) as error:
                self._pause(error)
        return self._ask_here(tenant, num_tokens)

    async def _ask_redis(self, tenant: Tenant, num_tokens: int, lease_id: str) -> tuple[float, str] | None:
        keys = (self._bucket_key(tenant.name), self._lease_key(tenant.name))
        limits = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_concurrent)
        arguments: tuple[Any, ...] = (*keys, *limits, num_tokens, lease_id, int(LEASE_S * 1000))
        try:
            granted, wait_ms, limit = await self._redis.evalsha(self._digest, len(keys), *arguments)
        except NoScriptError:
            granted, wait_ms, limit = await self._redis.eval(self._script, len(keys), *arguments)
        return None if granted else (wait_ms / 1000, limit.decode())

    def _ask_here(self, tenant: Tenant, num_tokens: int) -> tuple[float, str] | None:
        self.num_local += 1
        share = 1 / self.num_routers
        requests, tokens = tenant.requests_per_minute * share, tenant.tokens_per_minute * share
        most = max(1, round(tenant.max_concurrent * share)) if tenant.max_concurrent else 0
        now = self._clock()
        bucket = self._buckets.get(tenant.name)
        if bucket is None:
            if len(self._buckets) >= MAX_LOCAL_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
            running = sum(other.name == tenant.name for other in self._leases.values())
            bucket = self._buckets[tenant.name] = LocalBucket(now, requests, tokens, running)
        return bucket.take(now, requests, tokens, most, num_tokens)

    async def _sync(self) -> None:
        released, owed = self._released, self._owed
        self._released, self._owed = {}, {}
        pipe = self._redis.pipeline(transaction=False)
        seconds, micros = await self._redis.time()
        now_ms = seconds * 1000 + micros // 1000
        for lease_id, tenant in released.items():
            pipe.zrem(self._lease_key(tenant.name), lease_id)
        for lease_id, tenant in self._leases.items():
            # XX: a lease that ran out is not taken back from whoever has the place now.
            pipe.zadd(self._lease_key(tenant.name), {lease_id: now_ms + int(LEASE_S * 1000)}, xx=True)
            pipe.pexpire(self._lease_key(tenant.name), int(LEASE_S * 2000))
        for name, tokens in owed.items():
            pipe.hincrbyfloat(self._bucket_key(name), "tokens", -tokens)
        routers = f"{self._prefix}:routers"
        pipe.zadd(routers, {self._router_id: now_ms})
        pipe.zremrangebyscore(routers, "-inf", now_ms - int(ROUTER_LEASE_S * 1000))
        pipe.expire(routers, 60)
        pipe.zcard(routers)
        try:
            self.num_routers = max(1, (await pipe.execute())[-1])
        except BaseException:
            self._released |= released
            for name, tokens in owed.items():
                self._owed[name] = self._owed.get(name, 0) + tokens
            raise
        self._buckets.clear()

    def _pause(self, error: BaseException) -> None:
        now = self._clock()
        if now >= self._paused_until + PAUSE_AFTER_FAILURE_S:
            _log.warning("quotas are counted by this router alone", reason=str(error) or type(error).__name__)
        self._paused_until = now + PAUSE_AFTER_FAILURE_S

    def _bucket_key(self, tenant: str) -> str:
        return f"{self._prefix}:quota:{tenant}"

    def _lease_key(self, tenant: str) -> str:
        return f"{self._prefix}:running:{tenant}"
