"""What tenants were served by all routers together, so that fairness holds among routers as it does in one.

    each second: own service since the last time ──► HINCRBYFLOAT baton:{C}:served ──► totals of all routers
                 total − total before − own ──► the router's own virtual token counters

Without Redis each router is fair by itself. A router that dies leaves nothing behind but what it had served.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

SYNC_S: Final = 1.0
KEY_LIFETIME_S: Final = 3600
# Tenants of one exchange; the others wait for the next.
MAX_TENANTS_A_SYNC: Final = 1024


class Served(Protocol):
    """router/admission.py's Admission."""

    def take_served(self) -> dict[str, float]: ...

    def add_served_elsewhere(self, tenant: str, weighted_tokens: float) -> None: ...


class ServedSync:
    """`run` is a task of the router."""

    def __init__(self, redis: Redis, cluster: str, served: Served) -> None:
        self._redis = redis
        self._key = f"baton:{{{cluster}}}:served"
        self._served = served
        self._owed: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            for tenant, tokens in self._served.take_served().items():
                self._owed[tenant] = self._owed.get(tenant, 0.0) + tokens
            try:
                async with asyncio.timeout(SYNC_S):
                    await self.exchange()
            except (RedisError, OSError, TimeoutError):
                continue

    async def exchange(self) -> None:
        """One round trip for what was served here; another router's tenants are asked for by their own service."""
        own = dict(list(self._owed.items())[:MAX_TENANTS_A_SYNC])
        asked = {**dict.fromkeys(list(self._totals)[:MAX_TENANTS_A_SYNC], 0.0), **own}
        if not asked:
            return
        pipe = self._redis.pipeline(transaction=False)
        for tenant, tokens in asked.items():
            pipe.hincrbyfloat(self._key, tenant, tokens)
        pipe.expire(self._key, KEY_LIFETIME_S)
        totals = await pipe.execute()
        for (tenant, tokens), total in zip(asked.items(), totals, strict=False):
            self._owed.pop(tenant, None)
            before = self._totals.pop(tenant, None)
            self._totals[tenant] = total
            if before is not None and total - before - tokens > 0.5:
                self._served.add_served_elsewhere(tenant, total - before - tokens)
        while len(self._totals) > MAX_TENANTS_A_SYNC:
            del self._totals[next(iter(self._totals))]
