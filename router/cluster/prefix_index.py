"""The router's view of the global prefix index: how much of a prompt each worker holds, in one round trip to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from common.kvcache.block_hash import HASH_BYTES
from common.telemetry import get_logger

LOOKUP_TIMEOUT_S: Final = 0.05
# After a failure, requests go without the index this long, instead of each waiting for the timeout.
PAUSE_AFTER_FAILURE_S: Final = 0.5

_log = get_logger(__name__)


class PrefixIndex:
    """Reads what workers publish (common/registry.py). Never raises for Redis: without it every prefix is 0 long.

    clock: monotonic seconds.
    """

    def __init__(self, redis: Redis, clock: Callable[[], float]) -> None:
        self._redis = redis
        self._clock = clock
        self._script = (files(__package__) / "prefix_index.lua").read_text()
        self._digest = sha1(self._script.encode(), usedforsecurity=False).hexdigest()
        self._paused_until = float("-inf")
        self.num_answered = self.num_failed = self.num_skipped = 0

    async def cached_blocks(self, block_keys: Sequence[str], packed_hashes: bytes) -> list[int]:
        """For each key (`blocks_key` of a worker) the number of leading blocks of the chain that it holds.

        packed_hashes: the chain's 16-byte hashes, joined. All zeros where Redis fails or takes longer than
        LOOKUP_TIMEOUT_S.
        """
        nothing = [0] * len(block_keys)
        if not packed_hashes or not block_keys:
            return nothing
        if self._clock() < self._paused_until:
            self.num_skipped += 1
            return nothing
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                blocks = await self._evaluate(block_keys, packed_hashes)
            self.num_answered += 1
            return blocks
        except (RedisError, OSError, TimeoutError) as error:
            self.num_failed += 1
            self._paused_until = self._clock() + PAUSE_AFTER_FAILURE_S
            _log.warning("prefix index unavailable, placing without it", error=str(error) or type(error).__name__)
            return nothing

    async def _evaluate(self, block_keys: Sequence[str], packed_hashes: bytes) -> list[int]:
        try:
            lengths = await self._redis.evalsha(self._digest, len(block_keys), *block_keys, HASH_BYTES, packed_hashes)
        except NoScriptError:
            lengths = await self._redis.eval(self._script, len(block_keys), *block_keys, HASH_BYTES, packed_hashes)
        return [int(n) for n in lengths]
