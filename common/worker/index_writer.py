"""Writes one incarnation's entries of the prefix index, batch by batch, each numbered. Schema: common/registry.py.

    sequence 41 ──batch 42, expects 41──► applied, sequence 42
    sequence 17 ──batch 42, expects 41──► refused: Redis lost something (failover, eviction, an emptied database)

A refused batch means that Redis is not what this worker left there; one snapshot, in bounded pieces, makes it true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha1
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from common.kvcache.block_hash import HASH_BYTES
from common.registry import blocks_key, host_blocks_key, sequence_key
from common.worker.block_tiers import Batch

# Hashes a script call: Redis serves nobody else meanwhile, some 0.5 ms.
CHUNK: Final = 1000

# KEYS: sequence, blocks, host blocks. ARGV: expected sequence, lease in ms, bytes of a hash, then packed hashes:
# removed, added, removed from the host tier, added to it. Returns 1, or 0 where the sequence is another.
_APPLY: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local width = tonumber(ARGV[3])
local function change(command, key, packed)
  if #packed == 0 then return end
  local hashes = {}
  for at = 1, #packed, width do hashes[#hashes + 1] = string.sub(packed, at, at + width - 1) end
  redis.call(command, key, unpack(hashes))
end
change('SREM', KEYS[2], ARGV[4])
change('SADD', KEYS[2], ARGV[5])
change('SREM', KEYS[3], ARGV[6])
change('SADD', KEYS[3], ARGV[7])
redis.call('SET', KEYS[1], tonumber(ARGV[1]) + 1, 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
return 1
"""


class SequenceGapError(Exception):
    """Redis does not hold what was written last."""


class IndexWriter:
    """sequence: number of the last batch that Redis has taken. lease_ms: life of the entries without another write."""

    def __init__(self, redis: Redis, cluster: str, worker_id: str, epoch: str, lease_ms: int) -> None:
        self._redis = redis
        self._lease_ms = lease_ms
        self._sequence_key = sequence_key(cluster, worker_id, epoch)
        self.keys: Final = (
            self._sequence_key,
            blocks_key(cluster, worker_id, epoch),
            host_blocks_key(cluster, worker_id, epoch),
        )
        self._digest = sha1(_APPLY.encode(), usedforsecurity=False).hexdigest()
        self.sequence = 0

    async def apply(self, batch: Batch) -> None:
        """All of it, removals first. Raises SequenceGapError, RedisError, OSError: then what arrived is unknown."""
        for piece in _pieces(batch):
            await self._apply_piece(piece)

    async def rewrite(self, everything: Batch) -> None:
        """Instead of whatever is there. Raises as apply."""
        self.sequence += 1
        pipe = self._redis.pipeline(transaction=False)
        # By name: of the pipeline of a Redis Cluster, `unlink` and `delete` take one slot apart from the next.
        pipe.execute_command("UNLINK", *self.keys)
        pipe.set(self._sequence_key, self.sequence, px=self._lease_ms)
        await pipe.execute()
        await self.apply(everything)

    async def _apply_piece(self, piece: Batch) -> None:
        packed = [b"".join(hashes) for hashes in (piece.removed, piece.added, piece.host_removed, piece.host_added)]
        arguments: list[Any] = [*self.keys, self.sequence, self._lease_ms, HASH_BYTES, *packed]
        try:
            applied = await self._redis.evalsha(self._digest, len(self.keys), *arguments)
        except NoScriptError:
            applied = await self._redis.eval(_APPLY, len(self.keys), *arguments)
        if not applied:
            raise SequenceGapError(f"Redis does not have batch {self.sequence}")
        self.sequence += 1


def _pieces(batch: Batch) -> Iterator[Batch]:
    """Each of at most CHUNK hashes."""
    parts: tuple[Sequence[bytes], ...] = (batch.removed, batch.added, batch.host_removed, batch.host_added)
    if sum(map(len, parts)) <= CHUNK:
        if any(parts):
            yield batch
        return
    for position, hashes in enumerate(parts):
        for start in range(0, len(hashes), CHUNK):
            piece: list[Sequence[bytes]] = [(), (), (), ()]
            piece[position] = hashes[start : start + CHUNK]
            yield Batch(*piece)
