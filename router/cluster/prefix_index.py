"""The router's view of the global prefix index: how much of a prompt each worker holds, in one round trip to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from common.kvcache.block_hash import HASH_BYTES
from common.registry import WorkerRecord, blocks_key, host_blocks_key
from common.telemetry import get_logger

LOOKUP_TIMEOUT_S: Final = 0.05
# After a failure, requests go without the index this long, instead of each waiting for the timeout.
PAUSE_AFTER_FAILURE_S: Final = 0.5

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Leading blocks of a prompt that a worker holds. device_blocks: those before the first that its host tier has."""

    blocks: int
    device_blocks: int


class PrefixIndex:
    """Reads what workers publish (common/registry.py). Never raises for Redis.

    clock: monotonic seconds. timeout_s: how long a request waits for an answer.
    """

    def __init__(
        self, redis: Redis, cluster: str, clock: Callable[[], float], timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> None:
        self._redis = redis
        self._cluster = cluster
        self._clock = clock
        self._timeout_s = timeout_s
        self._script = (files(__package__) / "prefix_index.lua").read_text()
        self._digest = sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._paused_until = float("-inf")
        self.num_answered = self.num_failed = self.num_skipped = 0

    async def lookup(self, workers: Sequence[WorkerRecord], packed_hashes: bytes) -> list[CachedPrefix] | None:
        """What each of these incarnations holds of the chain, in their order.

        packed_hashes: the chain's 16-byte hashes, joined. None where Redis fails or takes longer than
        timeout_s, and for a while after that.
        """
        if not packed_hashes or not workers:
            return [CachedPrefix(0, 0)] * len(workers)
        if self._clock() < self._paused_until:
            self.num_skipped += 1
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._evaluate(workers, packed_hashes)
            self.num_answered += 1
            return found
        except (RedisError, OSError, TimeoutError) as error:
            self.num_failed += 1
            self._paused_until = self._clock() + PAUSE_AFTER_FAILURE_S
            _log.warning("prefix index unavailable, placing without it", error=str(error) or type(error).__name__)
            return None

    async def _evaluate(self, workers: Sequence[WorkerRecord], packed_hashes: bytes) -> list[CachedPrefix]:
        keys = [blocks_key(self._cluster, w.worker_id, w.epoch) for w in workers]
        keys += [host_blocks_key(self._cluster, w.worker_id, w.epoch) for w in workers if w.has_host_tier]
        tiers = "".join("1" if w.has_host_tier else "0" for w in workers)
        arguments: list[str | bytes | int] = [*keys, HASH_BYTES, packed_hashes, tiers]
        try:
            answer = await self._redis.evalsha(self._digest, len(keys), *arguments)
        except NoScriptError:
            answer = await self._redis.eval(self._script, len(keys), *arguments)
        lengths = iter(cast(list[int], answer))
        return [CachedPrefix(blocks, device) for blocks, device in zip(lengths, lengths, strict=True)]
