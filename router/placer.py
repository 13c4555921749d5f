"""Placement with its inputs: the fleet's loads and the prefix index go in, a pair of sessions comes out."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from common.errors import BatonError, ErrorKind
from common.registry import blocks_key
from router.cluster.fleet import Fleet
from router.cluster.prefix_index import PrefixIndex
from router.cluster.worker_session import WorkerSession
from router.policy.placement import PlacementRequest, WorkerLoad, choose, fits, room_elsewhere

# How long a request that already ran waits for a worker to come (back): a restarted one loads its model first.
RETURN_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """prefill None: the decode worker computes the prompt.

    uncached_prefill_tokens: tokens that the computing side lacks. new_decode_blocks: blocks that decode must find.
    predicted_cached_tokens: what the computing side was thought to reuse; None where the index was not asked.
    """

    prefill: WorkerSession | None
    decode: WorkerSession
    uncached_prefill_tokens: int
    new_decode_blocks: int
    predicted_cached_tokens: int | None = None

    @property
    def worker_ids(self) -> list[str]:
        return [s.record.worker_id for s in (self.prefill, self.decode) if s is not None]


class Placer:
    """Chooses workers. Holds no request."""

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, cluster: str, block_size: int, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._cluster = cluster
        self._block_size = block_size
        self._clock = clock

    async def place(
        self, num_tokens: int, packed_hashes: bytes, failed: Collection[str] = (), *, wait: bool = False
    ) -> WorkerPair:
        """packed_hashes: block hashes of the prompt, joined. failed: workers to avoid where others are.

        wait: where no worker is there, wait up to RETURN_WAIT_S for one. Raises NO_WORKER; CONTEXT_LENGTH where
        there are workers, but none whose pool could hold so many tokens.
        """
        request = PlacementRequest(num_tokens, self._block_size, failed)
        cached = await self._cached_tokens(packed_hashes)
        give_up_at = self._clock() + (RETURN_WAIT_S if wait else 0.0)
        while (pair := self._choose(request, cached)) is None:
            self._refuse_what_never_fits(request)
            left_s = give_up_at - self._clock()
            if left_s <= 0:
                raise BatonError(ErrorKind.NO_WORKER, "no worker is available; try again shortly", retry_after_s=1.0)
            await self._fleet.wait_changed(left_s)
        return pair

    def has_room_elsewhere(self, decode_id: str, num_blocks: int) -> bool:
        """Whether a preempted sequence of this decode worker would find room on another."""
        return room_elsewhere(num_blocks, decode_id, [s.load() for s in self._fleet.usable("decode")])

    def _choose(self, request: PlacementRequest, cached: dict[str, int]) -> WorkerPair | None:
        prefills, decodes = (
            [s.load(cached.get(s.record.worker_id, 0)) for s in self._fleet.usable(role)]
            for role in ("prefill", "decode")
        )
        chosen = choose(request, prefills, decodes, random.random())
        if chosen is None:
            return None
        decode = self._fleet.session(chosen.decode_id)
        prefill = self._fleet.session(chosen.prefill_id) if chosen.prefill_id is not None else None
        if decode is None:
            return None
        prefill_cached = chosen.prefill_cached_tokens if prefill else chosen.decode_cached_tokens
        new_decode_tokens = max(0, request.num_tokens - chosen.decode_cached_tokens)
        return WorkerPair(
            prefill=prefill,
            decode=decode,
            uncached_prefill_tokens=max(0, request.num_tokens - prefill_cached),
            new_decode_blocks=-(-new_decode_tokens // self._block_size),
            predicted_cached_tokens=min(prefill_cached, self._reusable_tokens(request)) if cached else None,
        )

    def _reusable_tokens(self, request: PlacementRequest) -> int:
        """Who computes a prompt computes its last token, whatever is cached: its logits are needed."""
        return (request.num_tokens - 1) // self._block_size * self._block_size

    async def _cached_tokens(self, packed_hashes: bytes) -> dict[str, int]:
        """worker_id → cached prompt tokens, for all that could be chosen; empty where there is nothing to choose by."""
        prefills, decodes = self._fleet.usable("prefill"), self._fleet.usable("decode")
        if not packed_hashes or (len(prefills) <= 1 and len(decodes) <= 1):
            return {}
        records = [s.record for s in (*prefills, *decodes)]
        keys = [blocks_key(self._cluster, r.worker_id, r.epoch) for r in records]
        blocks = await self._index.cached_blocks(keys, packed_hashes)
        return {r.worker_id: n * self._block_size for r, n in zip(records, blocks, strict=True)}

    def _refuse_what_never_fits(self, request: PlacementRequest) -> None:
        loads: list[WorkerLoad] = [s.load() for s in self._fleet.usable("decode")]
        if loads and not any(fits(request, load) for load in loads):
            most = max(load.num_blocks for load in loads) * self._block_size - 1
            raise BatonError(
                ErrorKind.CONTEXT_LENGTH,
                f"the prompt has {request.num_tokens} tokens, but the workers' KV caches hold {most}: shorten it",
                param="prompt",
            )
