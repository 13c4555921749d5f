"""Placement with its inputs: the fleet's loads and what is known of prefixes go in, a pair of sessions comes out."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from operator import itemgetter
from typing import Final

from common.errors import BatonError, ErrorKind
from common.rpc.worker_messages import PullSource, WorkerIdentity
from router.cluster.fleet import Fleet
from router.cluster.prefix_index import CachedPrefix, PrefixIndex
from router.cluster.worker_session import WorkerSession
from router.policy.placement import Placement, choose, room_elsewhere
from router.policy.placement_cost import PlacementRequest, WorkerLoad, fits
from router.policy.recent_prefixes import RecentPrefixes
from router.policy.transfer_rate import TransferRate

# How long requests wait for a worker to come back: a restarted one loads its model first.
RETURN_WAIT_S: Final = 30.0
# After its first token a prompt is in the index: a worker's publishing interval, and a round trip.
INDEX_LAG_S: Final = 0.1
MAX_PULL_SOURCES: Final = 2
_NOTHING: Final = CachedPrefix(0, 0)


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """prefill None: the decode worker computes the prompt.

    uncached_prefill_tokens: tokens that the computing side lacks. new_decode_blocks: blocks that decode must find.
    predicted_cached_tokens: what the computing side was thought to reuse; None where the index gave no answer.
    predicted_ttft_s: from now to the first token. pull_sources: who holds more of the prompt than `prefill`, the most
    first; whether to pull is the worker's to decide.
    """

    prefill: WorkerSession | None
    decode: WorkerSession
    uncached_prefill_tokens: int
    new_decode_blocks: int
    predicted_cached_tokens: int | None = None
    predicted_ttft_s: float = 0.0
    pull_sources: tuple[PullSource, ...] = ()

    @property
    def worker_ids(self) -> list[str]:
        return [s.record.worker_id for s in (self.prefill, self.decode) if s is not None]


@dataclass(frozen=True, slots=True)
class _Known:
    """worker_id → leading blocks; from_index: whether the index said so, and not only this router's memory."""

    prefixes: Mapping[str, CachedPrefix]
    from_index: bool


class Placer:
    """Chooses workers, and remembers what it chose, within bounds. Holds no request.

    local_prefill_max_tokens, shared_cores: see PlacementRequest. transfers: what is known of the KV transfers' speed;
    shared with whoever observes them. clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        block_size: int,
        local_prefill_max_tokens: int,
        transfers: TransferRate,
        clock: Callable[[], float],
        *,
        shared_cores: bool = False,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._block_size = block_size
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._shared_cores = shared_cores
        self._transfers = transfers
        self._clock = clock
        self._recent = RecentPrefixes()
        self._rng = random.Random()

    async def place(
        self, num_tokens: int, packed_hashes: bytes, failed: Collection[str] = (), *, wait: bool = False
    ) -> WorkerPair:
        """packed_hashes: block hashes of the prompt, joined. failed: workers to avoid where others are.

        Where no worker is there, a request that ran already (`wait`) waits up to RETURN_WAIT_S for one, another until
        the last one has been gone for so long. Raises NO_WORKER; CONTEXT_LENGTH where there are workers, but none
        whose pool could hold so many tokens.
        """
        request = PlacementRequest(
            num_tokens=num_tokens,
            block_size=self._block_size,
            failed=failed,
            token_transfer_s=self._transfers.token_transfer_s,
            local_prefill_max_tokens=self._local_prefill_max_tokens,
            shared_cores=self._shared_cores,
        )
        known = await self._known_prefixes(packed_hashes)
        request = replace(request, pullable_tokens=self._pullable_tokens(known))
        give_up_at = self._clock() + max(0.0, RETURN_WAIT_S - (0.0 if wait else self._fleet.without_decode_s))
        while (pair := self._choose(request, packed_hashes, known)) is None:
            self._refuse_what_never_fits(request)
            left_s = give_up_at - self._clock()
            if left_s <= 0:
                raise BatonError(ErrorKind.NO_WORKER, "no worker is available; try again shortly", retry_after_s=1.0)
            await self._fleet.wait_changed(left_s)
        return pair

    @property
    def has_worker(self) -> bool:
        """Whether anybody could be chosen now, if there was room."""
        return bool(self._fleet.usable("decode"))

    def has_room_elsewhere(self, decode_id: str, num_blocks: int) -> bool:
        """Whether a preempted sequence of this decode worker would find room on another."""
        return room_elsewhere(num_blocks, decode_id, [s.load() for s in self._fleet.usable("decode")])

    def _choose(self, request: PlacementRequest, packed_hashes: bytes, known: _Known) -> WorkerPair | None:
        prefills, decodes = (
            [self._load(session, known) for session in self._fleet.usable(role)] for role in ("prefill", "decode")
        )
        chosen = choose(request, prefills, decodes, self._rng)
        if chosen is None:
            return None
        decode = self._fleet.session(chosen.decode_id)
        prefill = self._fleet.session(chosen.prefill_id) if chosen.prefill_id is not None else None
        if decode is None:
            return None
        holders = [_holder(session) for session in (prefill, decode) if session is not None]
        self._recent.note(packed_hashes, holders, self._clock() + chosen.ttft_s + INDEX_LAG_S)
        return self._pair(request, chosen, prefill, decode, known)

    def _pair(
        self,
        request: PlacementRequest,
        chosen: Placement,
        prefill: WorkerSession | None,
        decode: WorkerSession,
        known: _Known,
    ) -> WorkerPair:
        computing_cached = chosen.prefill_cached_tokens if prefill else chosen.decode_cached_tokens
        new_decode_tokens = max(0, request.num_tokens - chosen.decode_cached_tokens)
        # Who computes a prompt computes its last token, whatever is cached: its logits are needed.
        reusable_tokens = (request.num_tokens - 1) // self._block_size * self._block_size
        return WorkerPair(
            prefill=prefill,
            decode=decode,
            uncached_prefill_tokens=max(0, request.num_tokens - computing_cached),
            new_decode_blocks=-(-new_decode_tokens // self._block_size),
            predicted_cached_tokens=min(computing_cached, reusable_tokens) if known.from_index else None,
            predicted_ttft_s=chosen.ttft_s,
            pull_sources=() if prefill is None else self._pull_sources(prefill, known),
        )

    def _pull_sources(self, prefill: WorkerSession, known: _Known) -> tuple[PullSource, ...]:
        own = known.prefixes.get(prefill.record.worker_id, _NOTHING).blocks
        better = [(n, s) for n, s in self._lenders(known) if n > own and s is not prefill]
        return tuple(
            PullSource(
                address=session.record.grpc_address,
                worker=WorkerIdentity(session.record.worker_id, session.record.epoch),
                secret=bytes.fromhex(session.record.pull_secret),
                num_tokens=num_blocks * self._block_size,
            )
            for num_blocks, session in nlargest(MAX_PULL_SOURCES, better, key=itemgetter(0))
        )

    def _pullable_tokens(self, known: _Known) -> int:
        return max((n for n, _ in self._lenders(known)), default=0) * self._block_size

    def _lenders(self, known: _Known) -> list[tuple[int, WorkerSession]]:
        """Leading blocks and who holds them, of those that lend."""
        sessions = (self._fleet.session(worker_id) for worker_id, prefix in known.prefixes.items() if prefix.blocks)
        return [
            (known.prefixes[s.record.worker_id].blocks, s)
            for s in sessions
            if s is not None and s.ready and s.record.pull_secret
        ]

    def _load(self, session: WorkerSession, known: _Known) -> WorkerLoad:
        prefix = known.prefixes.get(session.record.worker_id, _NOTHING)
        on_device = prefix.device_blocks * self._block_size
        load = session.load(on_device, prefix.blocks * self._block_size - on_device)
        if session.record.block_size == self._block_size:
            return load
        # Of another size: counted in blocks of ours.
        ratio = session.record.block_size / self._block_size
        num_blocks, num_free = int(load.num_blocks * ratio), int(load.num_free_blocks * ratio)
        return replace(load, num_blocks=num_blocks, num_free_blocks=num_free)

    async def _known_prefixes(self, packed_hashes: bytes) -> _Known:
        """For all that could be chosen. Where the index is away, what this router remembers must do."""
        sessions = [*self._fleet.usable("prefill"), *self._fleet.usable("decode")]
        if not packed_hashes or not sessions:
            return _Known({}, from_index=False)
        found = await self._index.lookup([s.record for s in sessions], packed_hashes)
        remembered = self._recent.num_blocks(packed_hashes, pending_since=None if found is None else self._clock())
        prefixes: dict[str, CachedPrefix] = {}
        for position, session in enumerate(sessions):
            indexed = _NOTHING if found is None else found[position]
            own = remembered.get(_holder(session), 0)
            longer = own > indexed.blocks
            prefixes[session.record.worker_id] = CachedPrefix(own, own) if longer else indexed
        return _Known(prefixes, from_index=found is not None)

    def _refuse_what_never_fits(self, request: PlacementRequest) -> None:
        loads: list[WorkerLoad] = [s.load() for s in self._fleet.usable("decode")]
        if loads and not any(fits(request, load) for load in loads):
            most = max(load.num_blocks for load in loads) * self._block_size - 1
            raise BatonError(
                ErrorKind.CONTEXT_LENGTH,
                f"the prompt has {request.num_tokens} tokens, but the workers' KV caches hold {most}: shorten it",
                param="prompt",
            )


def _holder(session: WorkerSession) -> str:
    """An incarnation: what a restarted worker held is gone."""
    return f"{session.record.worker_id}:{session.record.epoch}"
