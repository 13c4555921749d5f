"""Holds the prefix index against what workers find, and has one whose entries are wrong write them anew."""

from __future__ import annotations

import asyncio
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.registry import reread_key
from common.telemetry import get_logger
from router.cluster.fleet import Fleet
from router.policy.index_error import IndexErrors

ASK_TIMEOUT_S: Final = 1.0
# A worker looks once a second; one that is gone must not leave the question for ever.
QUESTION_LIFETIME_MS: Final = 10_000

_log = get_logger(__name__)


class IndexAudit:
    """Belongs to the event loop. `run` is a task of the router's process: it asks; `note` never waits."""

    def __init__(self, redis: Redis, cluster: str, fleet: Fleet) -> None:
        self._redis = redis
        self._cluster = cluster
        self._fleet = fleet
        self._errors = IndexErrors()
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self.num_rereads = 0

    def note(self, worker_id: str, foretold_tokens: int, found_tokens: int) -> None:
        """One placement by the index, and what its worker found cached."""
        if self._fleet.session(worker_id) is None:
            return
        self._errors.keep([s.record.worker_id for s in self._fleet.sessions()])
        if self._errors.note(worker_id, foretold_tokens, found_tokens):
            self._due.add(worker_id)
            self._wake.set()

    def error_ratio(self, worker_id: str) -> float:
        return self._errors.ratio(worker_id)

    async def run(self) -> None:
        """Until cancelled. A question that can't be asked is dropped: the error goes on, and asks again."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due:
                await self._ask(self._due.pop())

    async def _ask(self, worker_id: str) -> None:
        session = self._fleet.session(worker_id)
        if session is None:
            return
        key = reread_key(self._cluster, worker_id, session.record.epoch)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self._redis.set(key, 1, px=QUESTION_LIFETIME_MS)
        except (RedisError, OSError, TimeoutError):
            return
        self.num_rereads += 1
        _log.warning(
            "the prefix index is wrong about a worker: asking it to write its entries anew", worker_id=worker_id
        )
