"""Simulated workers: service times from the step-rate model, caches with real evictions.

Prefill: prompts one after another, in order of arrival. Decode: all streams advance by one token a step; prompts that
are computed here ride along in chunks, which lengthens those steps. Between two events all steps of a worker are alike,
so that time is jumped over, not stepped through.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from common.step_rates import StepRates
from loadtest.simulate.cache import LruCache, cached_tokens
from loadtest.simulate.clock import VirtualClock
from loadtest.traces import TraceEntry

# What a decode worker computes of a prompt in one step.
CHUNK_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Machine:
    """rates: of every worker. cache_blocks: of each. token_transfer_s: seconds to move a token's KV."""

    rates: StepRates
    cache_blocks: int
    block_tokens: int
    token_transfer_s: float


@dataclass(slots=True)
class SimRequest:
    """Seconds of virtual time."""

    entry: TraceEntry
    arrived_at: float
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_cached_tokens: int = 0
    was_local: bool = False


class SimPrefill:
    def __init__(self, worker_id: str, machine: Machine, clock: VirtualClock) -> None:
        self.worker_id = worker_id
        self.cache = LruCache(machine.cache_blocks)
        # Tokens accepted and not computed, by what was known of the cache at their arrival.
        self.queued_tokens = 0
        self._machine = machine
        self._clock = clock
        self._queue: deque[tuple[SimRequest, int, Callable[[], None]]] = deque()
        self._busy = False

    @property
    def num_running(self) -> int:
        return len(self._queue) + self._busy

    def submit(self, request: SimRequest, on_first_token: Callable[[], None]) -> None:
        uncached = request.entry.input_tokens - self._cached(request)
        self.queued_tokens += uncached
        self._queue.append((request, uncached, on_first_token))
        if not self._busy:
            self._start()

    def _start(self) -> None:
        request, expected, on_first_token = self._queue.popleft()
        self._busy = True
        request.num_cached_tokens = self._cached(request)
        tokens = request.entry.input_tokens - request.num_cached_tokens
        steps = max(1, math.ceil(tokens / 2048))
        rates = self._machine.rates
        self.cache.use(request.entry.block_ids[: request.num_cached_tokens // self._machine.block_tokens])

        def done() -> None:
            self.queued_tokens -= expected
            self.cache.use(request.entry.block_ids)
            self._busy = False
            on_first_token()
            if self._queue:
                self._start()

        self._clock.at(self._clock.now + steps * rates.base_s + tokens * rates.prefill_token_s, done)

    def _cached(self, request: SimRequest) -> int:
        blocks = self.cache.num_cached(request.entry.block_ids)
        return cached_tokens(blocks, request.entry.input_tokens, self._machine.block_tokens)


@dataclass(slots=True)
class _LocalPrompt:
    request: SimRequest
    tokens: int
    on_first_token: Callable[[], None] = field(repr=False)


class SimDecode:
    """num_expected: streams that were placed here and whose KV is still on its way."""

    def __init__(self, worker_id: str, machine: Machine, clock: VirtualClock) -> None:
        self.worker_id = worker_id
        self.cache = LruCache(machine.cache_blocks)
        self.num_expected = 0
        self.used_blocks = 0
        self._machine = machine
        self._clock = clock
        self._steps = 0
        self._step_began = 0.0
        # (step after which it ends, order, request)
        self._streams: list[tuple[int, int, SimRequest]] = []
        self._prompts: deque[_LocalPrompt] = deque()
        self._order = count()
        self._version = 0

    @property
    def num_running(self) -> int:
        return len(self._streams) + len(self._prompts) + self.num_expected

    @property
    def queued_tokens(self) -> int:
        return sum(prompt.tokens for prompt in self._prompts)

    def join(self, request: SimRequest) -> None:
        """Its KV is here, its first token is out."""
        self._advance()
        self.num_expected -= 1
        self.cache.use(request.entry.block_ids)
        self._add_stream(request)
        self._plan()

    def prefill_here(self, request: SimRequest, on_first_token: Callable[[], None]) -> None:
        self._advance()
        blocks = self.cache.num_cached(request.entry.block_ids)
        cached = cached_tokens(blocks, request.entry.input_tokens, self._machine.block_tokens)
        request.num_cached_tokens, request.was_local = cached, True
        self._prompts.append(_LocalPrompt(request, request.entry.input_tokens - cached, on_first_token))
        self._plan()

    def take_blocks(self, request: SimRequest) -> None:
        self.used_blocks += len(request.entry.block_ids) + 1

    def _add_stream(self, request: SimRequest) -> None:
        heapq.heappush(
            self._streams, (self._steps + max(0, request.entry.output_tokens - 1), next(self._order), request)
        )

    def _step_s(self) -> float:
        chunk = min(CHUNK_TOKENS, self._prompts[0].tokens) if self._prompts else 0
        return self._machine.rates.step_s(chunk, len(self._streams))

    def _advance(self) -> None:
        """Count the whole steps that have passed since the last event."""
        if not self._streams and not self._prompts:
            self._step_began = self._clock.now
            return
        step_s = self._step_s()
        steps = int((self._clock.now - self._step_began) / step_s + 1e-6)
        self._steps += steps
        self._step_began += steps * step_s
        if self._prompts and steps:
            prompt = self._prompts[0]
            prompt.tokens = max(0, prompt.tokens - steps * CHUNK_TOKENS)

    def _plan(self) -> None:
        """Wake up when the next stream or prompt is through."""
        self._settle()
        self._version += 1
        version = self._version
        steps = []
        if self._streams:
            steps.append(self._streams[0][0] - self._steps)
        if self._prompts:
            # A last, shorter chunk makes a shorter step: its length changes there.
            steps.append(max(1, self._prompts[0].tokens // CHUNK_TOKENS))
        if steps:
            when = self._step_began + max(1, min(steps)) * self._step_s()
            self._clock.at(when, lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version == self._version:
            self._advance()
            self._plan()

    def _settle(self) -> None:
        """End what is through."""
        while self._streams and self._streams[0][0] <= self._steps:
            request = heapq.heappop(self._streams)[2]
            request.ended_at = self._clock.now
            self.used_blocks -= len(request.entry.block_ids) + 1
        while self._prompts and self._prompts[0].tokens == 0:
            prompt = self._prompts.popleft()
            self.cache.use(prompt.request.entry.block_ids)
            prompt.on_first_token()
            self._add_stream(prompt.request)
