"""What every scheduler does, whichever phase it serves: accept or refuse sequences, hold their blocks, end them.

One round of the engine:   handle(…)*   expire   schedule ──► runner ──► complete | fail_step   take_news
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Generic, TypeVar

from common.engine.batch import ScheduledSequence
from common.engine.chunk_budget import BudgetLimits, first_budget, next_budget
from common.engine.cost_rates import DEFAULT_RATES, CostRates
from common.engine.loans import Loans, TransferOpener
from common.engine.messages import (
    AbortCommand,
    AbortOwnerCommand,
    Command,
    DrainCommand,
    EndedLeg,
    EngineNews,
    HandBackCommand,
    LegOutput,
    LendCommand,
    LoanEnded,
    MemoryCommand,
    MemoryPressure,
    OwnerNews,
    StepShape,
    TransferEvent,
)
from common.engine.runner import SampledExtras, StepResult
from common.engine.sequence import Sequence, SequenceStatus, check_spec
from common.errors import BatonError, ErrorKind, invalid
from common.kvcache.block_pool import BlockPool
from common.kvcache.prefix_cache import Allocation, PrefixCache
from common.logprobs import TokenLogprobs
from common.rpc.worker_messages import LoadReport, SequenceSpec
from common.sampling_params import FinishReason, SamplingParams

Post = Callable[[TransferEvent], None]
OVERLOADED_RETRY_AFTER_S: Final = 1.0
# While memory is short: a step's buffers grow with its tokens.
SHED_CHUNK_TOKENS: Final = 64
NO_EXTRAS: Final = SampledExtras()
S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """chunk_budget_tokens: most tokens that the chunks of one step compute; a decode step's single tokens come on top.
    step_target_s: a step shall take no longer, so that chunks get fewer tokens where they must; 0: as many as allowed.

    max_model_len: tokens of a sequence, prompt and output; the pool must have room for their KV. max_running: sequences
    that hold blocks to take part in steps. max_waiting: sequences that hold none yet. rates: what KV costs here.
    """

    block_size: int
    vocab_size: int
    max_model_len: int
    chunk_budget_tokens: int
    max_running: int
    max_waiting: int
    step_target_s: float = 0.0
    rates: CostRates = DEFAULT_RATES


class SequenceScheduler(ABC, Generic[S]):
    """Base of both schedulers. One thread calls it. It never waits, and raises only where Baton itself has a bug.

    It owns the sequences, and through their tables the references to `pool`'s blocks.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, cache: PrefixCache) -> None:
        if config.max_model_len > pool.num_blocks * config.block_size:
            raise ValueError(f"{config.max_model_len} tokens of context don't fit {pool.num_blocks} blocks")
        self._config = config
        self._pool = pool
        self._cache = cache
        self._sequences: dict[str, S] = {}
        self._loans = Loans(pool, cache, config.block_size)
        self._next_arrival = 0
        self._draining = False
        self._pressure = MemoryPressure.OPEN
        # Of sequences that run at once, while memory is short.
        self._running_cap = config.max_running
        # No sequence's deadline is earlier; it may be early itself, once its sequence has ended.
        self._earliest_deadline = inf
        self._step: list[tuple[S, ScheduledSequence]] = []
        self._step_shape: StepShape | None = None
        self._step_began_at = 0.0
        self._canary_blocks: list[int] = []
        self._budget_limits = BudgetLimits(config.chunk_budget_tokens, config.step_target_s)
        self._budget = first_budget(self._budget_limits, config.rates.token_ns / 1e9)
        self._by_owner: dict[int, OwnerNews] = {}
        self._ended_legs: list[EndedLeg] = []
        self._changed = False
        self._prefix_queries_total = 0
        self._prefix_hits_total = 0
        self._prefix_host_hits_total = 0
        self._num_preemptions_total = 0
        self._num_dropped_events_total = 0

    def lend_by(self, sender: TransferOpener, post: Post) -> None:
        """Cached blocks may be sent to workers that ask for them. Call before the engine starts."""
        self._loans.attach(sender, post)

    # What the engine calls

    @property
    def num_open(self) -> int:
        """Sequences and loans that have not ended, blocks of which may still be in use."""
        return len(self._sequences) + len(self._loans)

    @property
    def earliest_deadline(self) -> float:
        """When `expire` must be called at the latest."""
        return self._earliest_deadline

    def handle(self, item: Command | TransferEvent, now: float) -> None:
        """Take one command or event in. What came too late, or twice, is counted and dropped."""
        self._changed = True
        match item:
            case AbortCommand():
                sequence = self._sequences.get(item.transfer_id)
                if sequence is not None and sequence.owner == item.owner:
                    self._let_go(sequence, None, now)
            case AbortOwnerCommand():
                for sequence in [s for s in self._sequences.values() if s.owner == item.owner]:
                    self._let_go(sequence, None, now)
            case DrainCommand():
                self._draining = True
            case MemoryCommand():
                self._feel(item.pressure)
            case HandBackCommand():
                error = BatonError(ErrorKind.DRAINING, "this worker is stopping: the request goes on elsewhere")
                for sequence in [s for s in self._sequences.values() if not self._is_leaving(s)]:
                    self._let_go(sequence, error, now)
            case LendCommand():
                self._loans.lend(item, now)
            case LoanEnded():
                if not self._loans.end(item):
                    self._drop()
            case _:
                self._handle_own(item, now)

    def _feel(self, pressure: MemoryPressure) -> None:
        self._pressure = pressure
        if pressure is MemoryPressure.OPEN:
            self._running_cap = self._config.max_running
        elif pressure is MemoryPressure.SHED:
            self._running_cap = max(1, min(self._running_cap, self._num_running()) // 2)

    @property
    def _chunk_tokens(self) -> int:
        """That the chunks of the next step may compute together."""
        tokens = self._budget.tokens
        return min(tokens, SHED_CHUNK_TOKENS) if self._pressure is MemoryPressure.SHED else tokens

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        if now < self._earliest_deadline:
            return
        for sequence in [s for s in self._sequences.values() if s.deadline <= now]:
            sequence.deadline = inf
            error = BatonError(ErrorKind.DEADLINE_EXCEEDED, f"the deadline passed while {sequence.status}")
            self._let_go(sequence, error, now)
        self._earliest_deadline = min((s.deadline for s in self._sequences.values()), default=inf)

    def schedule(self, now: float) -> list[ScheduledSequence]:
        """Decide on the next step. Empty: there is nothing to do before the next command or event."""
        self._step = self._plan_step(now)
        self._step_began_at = now
        self._step_shape = _shape_of(self._step) if self._step else None
        return [scheduled for _, scheduled in self._step]

    @property
    def step_shape(self) -> StepShape | None:
        """Of the step that was decided on last."""
        return self._step_shape

    def begin_canary(self) -> list[ScheduledSequence]:
        """A step of one token that belongs to nobody, in a block of its own until `end_canary`; empty where none is
        free. To be called when there is nothing else to do."""
        taken = self._cache.allocate([], 1)
        if taken is None:
            return []
        self._canary_blocks = taken.block_ids
        return [ScheduledSequence([0], 0, taken.block_ids, SamplingParams(max_tokens=1))]

    def end_canary(self) -> None:
        """Its KV is nobody's."""
        self._pool.release(self._canary_blocks)
        self._canary_blocks = []

    def complete(self, result: StepResult, now: float) -> None:
        """The step has run. Of a sequence that failed in it, the new KV can't be trusted."""
        self._changed = True
        self._adapt_budget(now - self._step_began_at)
        step, self._step = self._step, []
        extras = result.extras
        for index, ((sequence, scheduled), token_id) in enumerate(zip(step, result.token_ids, strict=True)):
            more = extras.get(index, NO_EXTRAS) if extras else NO_EXTRAS
            if more.error is not None:
                self._let_go(sequence, more.error, now)
                continue
            if scheduled.copy is not None:
                self._drop_copy_source(sequence)
            self._advance(sequence, len(scheduled.token_ids))
            if more.prompt_logprobs:
                self._tell_prompt_logprobs(sequence, scheduled.start + 1, more)
            self._after_chunk(sequence, token_id, more, now)

    def fail_step(self, error: BatonError, now: float) -> None:
        """The step has failed: so do its sequences, whose new KV can't be trusted."""
        self._changed = True
        step, self._step = self._step, []
        for sequence, _ in step:
            self._let_go(sequence, error, now)

    def stop(self, error: BatonError, now: float) -> None:
        """End all sequences and take no more."""
        self._changed = True
        self._draining = True
        for sequence in list(self._sequences.values()):
            self._let_go(sequence, error, now)
        self._loans.abort_all()

    def take_news(self, step_s: float | None) -> EngineNews | None:
        """What happened since the last call, None where nothing did."""
        if not self._changed:
            return None
        self._changed = False
        by_owner, self._by_owner = self._by_owner, {}
        ended_legs = tuple(self._ended_legs)
        self._ended_legs.clear()
        shape = None if step_s is None else self._step_shape
        return EngineNews(by_owner, self._load_report(), self._cache.take_changes(), step_s, ended_legs, shape)

    def check_integrity(self) -> None:
        """Recount everything from scratch; raises RuntimeError naming the first fault."""
        held = Counter(b for s in self._sequences.values() for b in s.block_table.block_ids)
        held.update(self._loans.pinned_block_ids())
        held.update(s.copy_source for s in self._sequences.values() if s.copy_source is not None)
        self._pool.check_integrity(held)
        self._cache.check_integrity(self._pins())
        for sequence in self._sequences.values():
            blockless = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            num_blocks = len(sequence.block_table)
            if sequence.status == SequenceStatus.FINISHED or blockless != (num_blocks == 0):
                raise RuntimeError(f"{sequence.transfer_id} is {sequence.status} with {num_blocks} blocks")

    # What the two phases decide

    @abstractmethod
    def _handle_own(self, item: Command | TransferEvent, now: float) -> None:
        """New sequences, and the events of transfers."""

    @abstractmethod
    def _plan_step(self, now: float) -> list[tuple[S, ScheduledSequence]]: ...

    @abstractmethod
    def _after_chunk(self, sequence: S, token_id: int | None, more: SampledExtras, now: float) -> None:
        """A chunk's KV is computed and registered; token_id is what was sampled behind it, if it was the last."""

    @abstractmethod
    def _give_up(self, sequence: S, error: BatonError | None, now: float) -> None:
        """Let go of `sequence` as soon as nothing can touch its blocks. error None: its router aborted it.

        May be called again before it has ended.
        """

    def _is_leaving(self, sequence: S) -> bool:
        """Whether there is nothing left to do for it but to let others have its KV."""
        return False

    def _pins(self) -> Counter[bytes]:
        """Content that sequences without blocks have pinned in host memory."""
        return Counter()

    @abstractmethod
    def _num_running(self) -> int:
        """Sequences that take part in steps."""

    @abstractmethod
    def _num_waiting(self) -> int:
        """Sequences that hold no blocks."""

    @abstractmethod
    def _num_queued_tokens(self) -> int:
        """Accepted tokens whose KV must still be computed here."""

    # What they share

    def _accept(self, spec: SequenceSpec, owner: int, now: float, make: type[S]) -> S | None:
        """A new WAITING sequence, with its forks, or None after telling `owner` why not."""
        error = self._refusal(spec)
        if error is not None:
            for transfer_id in (spec.transfer_id, *(fork.transfer_id for fork in spec.forks)):
                self._emit(owner, LegOutput(transfer_id, error=error, leg_ended=True))
            self._ended_legs.append(EndedLeg.refused(spec, error, now))
            return None
        sequence = self._enter(spec, owner, now, make)
        for fork in spec.forks:
            sampling = replace(spec.sampling, seed=fork.seed, prompt_logprobs=None)
            # The leader's spans tell of the work; a fork has none of its own.
            own = replace(spec, transfer_id=fork.transfer_id, sampling=sampling, traceparent="", forks=())
            other = self._enter(own, owner, now, make)
            other.leader = sequence
            sequence.forks.append(other)
        self._earliest_deadline = min(self._earliest_deadline, spec.deadline)
        return sequence

    def _enter(self, spec: SequenceSpec, owner: int, now: float, make: type[S]) -> S:
        sequence = make(spec, owner, self._next_arrival, now, self._config.block_size)
        self._next_arrival += 1
        self._sequences[spec.transfer_id] = sequence
        return sequence

    def _refusal(self, spec: SequenceSpec) -> BatonError | None:
        if self._draining:
            return BatonError(ErrorKind.DRAINING, "this worker is stopping: send the request to another")
        if self._pressure is not MemoryPressure.OPEN:
            message = "this worker is short of memory: it takes nothing new until that is over"
            return BatonError(ErrorKind.OVERLOADED, message, retry_after_s=OVERLOADED_RETRY_AFTER_S)
        ids = [spec.transfer_id, *(fork.transfer_id for fork in spec.forks)]
        taken = next((each for each in ids if each in self._sequences or ids.count(each) > 1), None)
        if taken is not None:
            return invalid(f"transfer id {taken} is in use: a new attempt needs a new id")
        if len(ids) > self._config.max_running:
            return invalid(
                f"{len(ids)} continuations can't run at once: max_running is {self._config.max_running}", "n"
            )
        if self._num_waiting() >= self._config.max_waiting:
            return BatonError(
                ErrorKind.OVERLOADED,
                f"{self._num_waiting()} sequences wait at this worker already (max_waiting)",
                retry_after_s=OVERLOADED_RETRY_AFTER_S,
            )
        return check_spec(spec, self._config.vocab_size, self._config.max_model_len)

    def _let_go(self, sequence: S, error: BatonError | None, now: float) -> None:
        """Give `sequence` up, of itself or as one of several continuations of a prompt; a no-op after its end."""
        if sequence.status == SequenceStatus.FINISHED:
            return
        leader = sequence.leader
        if leader is not None:
            leader.forks.remove(sequence)
            sequence.leader = None
            self._end(sequence, now, finish_reason=None if error else FinishReason.ABORT, error=error)
            if leader.muted and not leader.forks:
                self._give_up(self._sequences[leader.transfer_id], None, now)
        elif error is None and sequence.forks:
            sequence.muted = True
        else:
            self._give_up(sequence, error, now)

    def _forks_of(self, sequence: S) -> list[S]:
        return [self._sequences[fork.transfer_id] for fork in sequence.forks]

    def _tell_prompt_logprobs(self, sequence: S, first_index: int, more: SampledExtras) -> None:
        sequence.next_prompt_logprob = max(sequence.next_prompt_logprob, first_index + len(more.prompt_logprobs))
        output = LegOutput(sequence.transfer_id, prompt_logprobs=more.prompt_logprobs, first_prompt_index=first_index)
        self._emit(sequence.owner, output)

    def _take_blocks(
        self, sequence: S, num_shareable_blocks: int, num_tokens: int, keep_free: int = 0
    ) -> Allocation | None:
        """Give `sequence`, which has none, blocks for positions [0, num_tokens): all, or none and None.

        Up to num_shareable_blocks of its leading full blocks come from the prefix cache, pool or host tier; these count
        as computed. A prompt whose logprobs are wanted is computed, cached or not. keep_free: blocks that must be free
        afterwards.
        """
        sequence.extend_hashes()
        if sequence.wants_prompt_logprobs:
            num_told_blocks = (sequence.next_prompt_logprob - 1) // self._config.block_size
            num_shareable_blocks = min(num_shareable_blocks, num_told_blocks)
        hashes = sequence.block_hashes[:num_shareable_blocks]
        taken = self._cache.allocate(hashes, sequence.block_table.num_missing(num_tokens), keep_free)
        if taken is not None:
            sequence.block_table.append(taken.block_ids)
            sequence.num_registered_blocks = taken.num_cached
            sequence.num_computed_tokens = taken.num_cached * self._config.block_size
        return taken

    def _adapt_budget(self, step_s: float) -> None:
        shape = self._step_shape
        if shape is not None:
            self._budget = next_budget(
                self._budget, self._budget_limits, shape.num_prefill_tokens, shape.num_decode_tokens, step_s
            )

    def _count_prefix_hits(self, sequence: S, taken: Allocation) -> None:
        """After the first _take_blocks of a sequence; a resumed one's hits on its own blocks are nobody's merit."""
        sequence.num_cached_tokens = sequence.num_computed_tokens
        self._prefix_queries_total += sequence.num_tokens
        self._prefix_hits_total += sequence.num_cached_tokens
        self._prefix_host_hits_total += taken.num_restored * self._config.block_size

    def _release_blocks(self, sequence: S) -> None:
        self._pool.release(sequence.block_table.clear())
        self._drop_copy_source(sequence)
        sequence.shares_tail = False
        sequence.num_registered_blocks = 0

    def _drop_copy_source(self, sequence: S) -> None:
        if sequence.copy_source is not None:
            self._pool.release([sequence.copy_source])
            sequence.copy_source = None

    def _advance(self, sequence: S, num_tokens: int) -> None:
        """The KV of the next num_tokens is final: blocks that are full now enter the prefix cache."""
        sequence.num_computed_tokens += num_tokens
        num_full = sequence.num_computed_tokens // self._config.block_size
        if num_full > sequence.num_registered_blocks:
            sequence.extend_hashes()
            block_ids = sequence.block_table.block_ids
            for i in range(sequence.num_registered_blocks, num_full):
                self._cache.register(block_ids[i], sequence.block_hashes[i])
            sequence.num_registered_blocks = num_full

    def _end(
        self,
        sequence: S,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        finish_reason: FinishReason | None = None,
        error: BatonError | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """The leg's last frame; blocks return to the pool. `sequence` must have left the queues already. Forks that
        still wait for it end with it.

        token_ids: the last of its tokens, which no frame has carried yet; logprobs: theirs.
        """
        for fork in self._forks_of(sequence):
            fork.leader = None
            fork.num_cached_tokens = sequence.num_cached_tokens
            self._end(fork, now, error=error)
        sequence.forks.clear()
        self._release_blocks(sequence)
        phase = sequence.status
        sequence.move_to(SequenceStatus.FINISHED)
        del self._sequences[sequence.transfer_id]
        if error is not None or sequence.traceparent:
            aborted = finish_reason is FinishReason.ABORT
            self._ended_legs.append(sequence.ended_leg(now, phase, error, aborted=aborted))
        output = LegOutput(
            transfer_id=sequence.transfer_id,
            first_index=sequence.num_output_tokens - len(token_ids),
            token_ids=token_ids,
            finish_reason=finish_reason,
            error=error,
            num_cached_tokens=sequence.num_cached_tokens,
            timings=sequence.timings(now),
            leg_ended=True,
            logprobs=logprobs,
        )
        self._emit(sequence.owner, output)

    def _emit(self, owner: int, output: LegOutput) -> None:
        self._news_of(owner).outputs.append(output)

    def _news_of(self, owner: int) -> OwnerNews:
        self._changed = True
        news = self._by_owner.get(owner)
        if news is None:
            news = self._by_owner[owner] = OwnerNews()
        return news

    def _load_report(self) -> LoadReport:
        num_waiting = self._num_waiting()
        host = self._cache.host_stats
        return LoadReport(
            num_running=len(self._sequences) - num_waiting,
            num_waiting=num_waiting,
            num_free_blocks=self._pool.num_free if self._pressure is MemoryPressure.OPEN else 0,
            num_cached_blocks=self._pool.num_reusable,
            num_blocks=self._pool.num_blocks,
            queued_prefill_tokens=self._num_queued_tokens(),
            prefix_queries_total=self._prefix_queries_total,
            prefix_hits_total=self._prefix_hits_total,
            prefix_host_hits_total=self._prefix_host_hits_total,
            num_host_blocks=host.num_slots,
            num_used_host_blocks=host.num_used,
            num_host_saves_total=host.num_saved_total,
            num_host_loads_total=host.num_loaded_total,
            num_preemptions_total=self._num_preemptions_total,
            chunk_budget_tokens=self._budget.tokens,
            num_dropped_events_total=self._num_dropped_events_total,
        )

    def _drop(self) -> None:
        """A late, duplicate or unknown event: counted, never asserted on."""
        self._num_dropped_events_total += 1


def _shape_of(step: ListOf[tuple[Sequence, ScheduledSequence]]) -> StepShape:
    num_tokens = num_decodes = 0
    for sequence, scheduled in step:
        num_new = len(scheduled.token_ids)
        num_tokens += num_new
        num_decodes += num_new == 1 and sequence.decode_started_at is not None
    return StepShape(len(step), num_tokens - num_decodes, num_decodes)
