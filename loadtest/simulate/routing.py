"""The routing policies that are compared: Baton's own, by the code that the router runs, and three simple ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from loadtest.simulate.cache import cached_tokens
from loadtest.simulate.workers import Machine, SimDecode, SimPrefill, SimRequest
from router.policy.placement import choose
from router.policy.placement_cost import PlacementRequest, WorkerLoad
from router.policy.recent_prefixes import RecentPrefixes

# How long after its prefill a prompt is known to the index: publishing interval and a round trip.
INDEX_LAG_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Route:
    """prefill None: the decode worker computes the prompt."""

    prefill: SimPrefill | None
    decode: SimDecode


class Router(Protocol):
    def route(self, request: SimRequest, now: float) -> Route: ...


class RoundRobin:
    def __init__(self, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode]) -> None:
        self._prefills, self._decodes = prefills, decodes
        self._turn = 0

    def route(self, request: SimRequest, now: float) -> Route:
        self._turn += 1
        return Route(self._prefills[self._turn % len(self._prefills)], self._decodes[self._turn % len(self._decodes)])


class LeastLoaded:
    """Fewest queued tokens, fewest streams; blind to caches."""

    def __init__(self, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode]) -> None:
        self._prefills, self._decodes = prefills, decodes

    def route(self, request: SimRequest, now: float) -> Route:
        return Route(
            min(self._prefills, key=lambda w: (w.queued_tokens, w.num_running)),
            min(self._decodes, key=lambda w: w.num_running),
        )


class PrefixOnly:
    """The longest cached prefix, whatever queues there; equal ones in turn. Decode as least loaded."""

    def __init__(self, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode]) -> None:
        self._prefills, self._decodes = prefills, decodes
        self._turn = 0

    def route(self, request: SimRequest, now: float) -> Route:
        self._turn += 1
        lengths = [w.cache.num_cached(request.entry.block_ids) for w in self._prefills]
        longest = [w for w, n in zip(self._prefills, lengths, strict=True) if n == max(lengths)]
        return Route(longest[self._turn % len(longest)], min(self._decodes, key=lambda w: w.num_running))


class BatonRouter:
    """router/policy's placement, with what the router's placer gives it; an index that lags, and exact load reports."""

    def __init__(
        self, prefills: Sequence[SimPrefill], decodes: Sequence[SimDecode], machine: Machine, local_max_tokens: int
    ) -> None:
        self._prefills = {w.worker_id: w for w in prefills}
        self._decodes = {w.worker_id: w for w in decodes}
        self._machine = machine
        self._local_max_tokens = local_max_tokens
        self._recent = RecentPrefixes(stride=1, max_entries=1 << 16)
        self._rng = random.Random(1)

    def route(self, request: SimRequest, now: float) -> Route:
        entry, machine = request.entry, self._machine
        packed = b"".join(block_id.to_bytes(16, "big") for block_id in entry.block_ids)
        pending = self._recent.num_blocks(packed, pending_since=now)

        def load(worker: SimPrefill | SimDecode, used_blocks: int) -> WorkerLoad:
            blocks = max(worker.cache.num_cached(entry.block_ids), pending.get(worker.worker_id, 0))
            return WorkerLoad(
                worker_id=worker.worker_id,
                usable=True,
                num_blocks=machine.cache_blocks,
                num_free_blocks=machine.cache_blocks - used_blocks,
                num_running=worker.num_running,
                queued_prefill_tokens=worker.queued_tokens,
                num_cached_tokens=cached_tokens(blocks, entry.input_tokens, machine.block_tokens),
                rates=machine.rates,
            )

        asked = PlacementRequest(
            num_tokens=entry.input_tokens,
            block_size=machine.block_tokens,
            token_transfer_s=machine.token_transfer_s,
            local_prefill_max_tokens=self._local_max_tokens,
        )
        prefills = [load(w, 0) for w in self._prefills.values()]
        decodes = [load(w, w.used_blocks) for w in self._decodes.values()]
        placement = choose(asked, prefills, decodes, self._rng)
        if placement is None:
            raise ValueError(f"a prompt of {entry.input_tokens} tokens fits no worker: give them more cache")
        holders = [placement.decode_id] + ([placement.prefill_id] if placement.prefill_id else [])
        self._recent.note(packed, holders, now + placement.ttft_s + INDEX_LAG_S)
        prefill = self._prefills[placement.prefill_id] if placement.prefill_id else None
        return Route(prefill, self._decodes[placement.decode_id])


MakeRouter = Callable[[Sequence[SimPrefill], Sequence[SimDecode], Machine], Router]


def routers(local_max_tokens: int) -> dict[str, MakeRouter]:
    """Name → how to make it."""
    return {
        "round robin": lambda p, d, m: RoundRobin(p, d),
        "least loaded": lambda p, d, m: LeastLoaded(p, d),
        "prefix only": lambda p, d, m: PrefixOnly(p, d),
        "Baton": lambda p, d, m: BatonRouter(p, d, m, local_max_tokens),
    }
