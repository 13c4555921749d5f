"""Continuous batching: sequences join and leave between steps; every running one gets a token a step.

    WAITING ──blocks set aside──► RECEIVING ──commit──► RUNNING ──────────► FINISHED
    (by class)└──prefill_here──────────────────────────►  │ ▲
                                        no block is free  ▼ │ blocks for all its tokens
                                                       PREEMPTED

Order of claims on blocks: running sequences; preempted ones; then those that wait, and not past their head; each by
class, then by arrival. Only a more urgent newcomer goes before a preempted sequence, and not for ever. Blocks are given
out only if those that run keep head-room, so that nobody gives way again at once. Preempted sequences get their KV from
what is left of it in the pool's cache and in host memory; the rest is computed from their tokens; nothing is emitted
twice. Decodes come first in a step; chunks share a budget of their own. docs/SCHEDULING.md has the formulas.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence as ListOf
from dataclasses import replace
from typing import Protocol

from common.engine.batch import ScheduledSequence
from common.engine.messages import (
    Command,
    LegOutput,
    Reservation,
    ReserveCommand,
    TransferCommitted,
    TransferEvent,
    TransferFailed,
)
from common.engine.runner import SampledExtras
from common.engine.scheduler import Post, SchedulerConfig, SequenceScheduler
from common.engine.sequence import SequenceStatus
from common.engine.waiting_queue import WaitingQueue, note_overtaken
from common.errors import BatonError, ErrorKind
from common.kvcache.block_pool import BlockPool
from common.kvcache.block_table import num_blocks_for_tokens
from common.kvcache.prefix_cache import Allocation, PrefixCache
from common.logprobs import TokenLogprobs
from common.rpc.worker_messages import LoadReport
from common.sampling_params import FinishReason
from decode_service.policy import (
    ADMIT_HORIZON_BLOCKS,
    RESUME_HORIZON_BLOCKS,
    head_room,
    longest,
    resume_rank,
    run_rank,
    tokens_to_reserve,
)
from decode_service.preemption import (
    Holder,
    Means,
    VictimPolicy,
    choose_victim,
    is_worth_moving,
    steps_until_free,
)
from decode_service.preemptor import Preemptor
from decode_service.sequence import DecodeSequence
from kv_transfer.types import Handoff, ReceiverCallbacks, TransferStats, TransferTarget, WorkerIdentity


class ReservationBook(Protocol):
    """KvReceiver, as far as a scheduler sees it. Thread-safe."""

    def reserve(
        self,
        transfer_id: str,
        block_ids: ListOf[int],
        num_cached_tokens: int,
        callbacks: ReceiverCallbacks,
        timeout_s: float,
    ) -> bytes:
        """Expect KV for these blocks, in order. Returns the secret that admits the sender; raises BatonError."""
        ...

    def release(self, transfer_id: str) -> None:
        """Expect it no more. When this returns, nothing writes to the blocks of that reservation."""
        ...


class DecodeScheduler(SequenceScheduler[DecodeSequence]):
    """address, identity: what a sender needs to find this worker. post: hands transfer events to the engine's inbox.
    pull_secret: for those who may ask it for cached blocks. victim_policy: who gives way when blocks run out."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        cache: PrefixCache,
        receiver: ReservationBook,
        address: str,
        identity: WorkerIdentity,
        post: Post,
        pull_secret: bytes = b"",
        victim_policy: VictimPolicy = choose_victim,
    ) -> None:
        super().__init__(config, pool, cache)
        self._preemptor = Preemptor(pool, cache, config.rates, config.block_size, victim_policy)
        self._receiver = receiver
        self._address = address
        self._identity = identity
        self._post = post
        self._pull_secret = pull_secret
        self._waiting: WaitingQueue[DecodeSequence] = WaitingQueue()
        self._receiving: dict[str, DecodeSequence] = {}
        # In the order of their claims.
        self._running: list[DecodeSequence] = []
        self._preempted: list[DecodeSequence] = []
        self._num_offered_total = 0

    def _handle_own(self, item: Command | TransferEvent, now: float) -> None:
        match item:
            case ReserveCommand():
                sequence = self._accept(item.spec, item.owner, now, DecodeSequence)
                if sequence is not None:
                    sequence.prefill_here = item.prefill_here
                    if not item.prefill_here:
                        sequence.next_prompt_logprob = sequence.num_prompt_tokens  # the prefill worker tells them
                    self._waiting.push(sequence)
            case TransferCommitted() | TransferFailed():
                sequence = self._sequences.get(item.transfer_id)
                if sequence is None or sequence.arrival != item.arrival or sequence.status != SequenceStatus.RECEIVING:
                    self._drop()
                elif isinstance(item, TransferFailed):
                    self._give_up(sequence, item.error, now)
                else:
                    self._join(sequence, item.handoff, item.stats, now)
            case _:
                self._drop()

    # One step

    def _plan_step(self, now: float) -> list[tuple[DecodeSequence, ScheduledSequence]]:
        self._shed()
        self._grow()
        self._resume()
        self._admit(now)
        chunk_budget = self._chunk_tokens
        decodes, chunks = [], []
        for sequence in self._running:
            if sequence.num_uncomputed_tokens == 1:
                decodes.append((sequence, sequence.next_chunk(1)))
            elif chunk_budget:
                scheduled = sequence.next_chunk(chunk_budget)
                chunk_budget -= len(scheduled.token_ids)
                chunks.append((sequence, scheduled))
        return decodes + chunks

    def _shed(self) -> None:
        """While memory is short, as few run as may."""
        while len(self._running) > self._running_cap:
            self._preempt(self._preemptor.choose_any(self._running), Means.RECOMPUTE)

    def _grow(self) -> None:
        """A slot for every running sequence's next token, the strongest claim first; preempts where there is none."""
        for sequence in list(self._running):
            if sequence.status != SequenceStatus.RUNNING:
                continue  # preempted for another
            while num_wanted := self._num_wanted_blocks(sequence):
                block_ids = self._pool.allocate(num_wanted)
                if block_ids is not None:
                    if sequence.shares_tail:
                        sequence.copy_source = sequence.block_table.replace(sequence.tail_index, block_ids.pop())
                        sequence.shares_tail = False
                    sequence.block_table.append(block_ids)
                    break
                victim, means = self._preemptor.choose(self._running)
                self._preempt(victim, means)
                if victim is sequence:
                    break

    def _num_wanted_blocks(self, sequence: DecodeSequence) -> int:
        """For the next token, and for a copy of the block that it goes to, if others still use that."""
        if sequence.shares_tail:
            tail = sequence.block_table.block_ids[sequence.tail_index]
            sequence.shares_tail = self._pool.references(tail) > 1
        return sequence.block_table.num_missing(sequence.num_tokens) + sequence.shares_tail

    def _preempt(self, sequence: DecodeSequence, means: Means) -> None:
        """Its full blocks stay in the prefix cache as long as nobody needs the room; its tokens stay with it."""
        self._changed = True
        loss_ns = self._preemptor.loss_ns(sequence)
        if means is Means.SWAP:
            self._preemptor.swap_out(sequence)
        self._running.remove(sequence)
        sequence.move_to(SequenceStatus.PREEMPTED)
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        insort(self._preempted, sequence, key=resume_rank)
        self._num_preemptions_total += 1
        self._offer(sequence, loss_ns)

    def _offer(self, sequence: DecodeSequence, loss_ns: int) -> None:
        """Where waiting for blocks here is dearer than going on elsewhere, its router is told that it may move it."""
        if sequence.decode_started_at is None:
            return
        max_model_len, block_size = self._config.max_model_len, self._config.block_size
        num_tokens = tokens_to_reserve(sequence, max_model_len, RESUME_HORIZON_BLOCKS)
        num_blocks = num_blocks_for_tokens(num_tokens, block_size)
        holders = [
            Holder(len(s.block_table), longest(s, max_model_len) + 1 - s.num_tokens)
            for s in (*self._running, *self._receiving.values())
        ]
        num_needed = num_blocks + self._head_room(RESUME_HORIZON_BLOCKS)
        stay_steps = steps_until_free(num_needed, self._pool.num_free, holders, block_size)
        if is_worth_moving(sequence.num_tokens, stay_steps, loss_ns, num_blocks, self._config.rates):
            self._num_offered_total += 1
            offer = LegOutput(sequence.transfer_id, sequence.num_output_tokens, num_wanted_blocks=num_blocks)
            self._emit(sequence.owner, offer)

    def _resume(self) -> None:
        while self._preempted and self._has_room_to_run(self._preempted[0]):
            sequence = self._preempted[0]
            if self._reserve_blocks(sequence, RESUME_HORIZON_BLOCKS, to_compute_here=True) is None:
                return
            self._changed = True
            del self._preempted[0]
            self._preemptor.let_go(sequence)
            self._run(sequence)

    def _admit(self, now: float) -> None:
        """New sequences, unless a preempted one of the same claim waits for blocks that they would take from it."""
        while self._waiting and self._has_room_to_run(self._waiting.head):
            sequence = self._waiting.head
            if self._preempted and resume_rank(self._preempted[0]) < resume_rank(sequence):
                return
            taken = self._reserve_blocks(sequence, ADMIT_HORIZON_BLOCKS, to_compute_here=sequence.prefill_here)
            if taken is None:
                return
            self._changed = True
            self._waiting.pop()
            if note_overtaken(sequence, self._preempted):
                self._preempted.sort(key=resume_rank)
            sequence.started_at = now
            self._count_prefix_hits(sequence, taken)
            if sequence.prefill_here:
                self._run(sequence)
            else:
                self._expect_transfer(sequence, now)

    def _has_room_to_run(self, sequence: DecodeSequence) -> bool:
        """A sequence whose KV is on the way counts: at its commit it runs at once, and so do its forks."""
        busy = sum(1 + len(each.forks) for group in (self._running, self._receiving.values()) for each in group)
        num_then = busy + 1 + len(sequence.forks)
        return num_then <= self._config.max_running and (busy == 0 or num_then <= self._running_cap)

    def _head_room(self, horizon_blocks: int) -> int:
        """Blocks that those who run, or will at their commit, will ask for within the horizon."""
        active = (*self._running, *self._receiving.values())
        num_forks = sum(len(each.forks) for each in active)
        own = head_room(active, self._config.max_model_len, horizon_blocks)
        # A fork begins with a copy of the prompt's last block.
        return own + num_forks * (1 + horizon_blocks)

    def _reserve_blocks(
        self, sequence: DecodeSequence, horizon_blocks: int, *, to_compute_here: bool
    ) -> Allocation | None:
        """What is computed here leaves the last token to compute, for its logits; a sender samples from it instead."""
        num_reusable_tokens = sequence.num_tokens - 1 if to_compute_here else sequence.num_tokens
        num_tokens = tokens_to_reserve(sequence, self._config.max_model_len, horizon_blocks)
        num_reusable_blocks = num_reusable_tokens // self._config.block_size
        return self._take_blocks(sequence, num_reusable_blocks, num_tokens, self._head_room(horizon_blocks))

    def _run(self, sequence: DecodeSequence) -> None:
        sequence.move_to(SequenceStatus.RUNNING)
        insort(self._running, sequence, key=run_rank)

    def _after_chunk(self, sequence: DecodeSequence, token_id: int | None, more: SampledExtras, now: float) -> None:
        if token_id is None:
            sequence.note_chunk(now)
            return
        if sequence.decode_started_at is None:
            sequence.note_chunk(now)
            sequence.first_token_at = sequence.decode_started_at = now
        if sequence.forks:
            for fork, (fork_token, logprobs) in zip(self._part(sequence, now), more.forks, strict=True):
                fork.first_token_at = now
                self._say(fork, fork_token, logprobs, now)
        self._say(sequence, token_id, more.logprobs, now)
        if sequence.muted and sequence.status == SequenceStatus.RUNNING:
            self._give_up(sequence, None, now)

    def _say(self, sequence: DecodeSequence, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """The next token of a running sequence, which it may end."""
        sequence.token_ids.append(token_id)
        told = () if logprobs is None else (logprobs,)
        finish_reason = sequence.finish_reason(self._config.max_model_len)
        if finish_reason is not None:
            self._running.remove(sequence)
            self._end(sequence, now, token_ids=(token_id,), finish_reason=finish_reason, logprobs=told)
            return
        output = LegOutput(sequence.transfer_id, sequence.num_output_tokens - 1, (token_id,), logprobs=told)
        self._emit(sequence.owner, output)

    def _part(self, leader: DecodeSequence, now: float) -> list[DecodeSequence]:
        """The leader's forks run from now on: on its blocks, as far as they hold KV, until they write to the last."""
        forks = self._forks_of(leader)
        leader.forks.clear()
        shared = list(leader.block_table.covering(leader.num_computed_tokens))
        tail_is_partial = leader.num_computed_tokens % self._config.block_size > 0
        leader.shares_tail = tail_is_partial
        for fork in forks:
            fork.leader = None
            self._pool.acquire(shared)
            fork.block_table.append(shared)
            fork.num_computed_tokens = leader.num_computed_tokens
            fork.num_registered_blocks = leader.num_registered_blocks
            fork.num_cached_tokens = leader.num_cached_tokens
            fork.block_hashes = list(leader.block_hashes)
            fork.shares_tail = tail_is_partial
            fork.started_at = leader.started_at
            fork.decode_started_at = now
            self._run(fork)
        return forks

    # A sequence's KV arriving

    def _expect_transfer(self, sequence: DecodeSequence, now: float) -> None:
        """Only the prompt's blocks that are not cached travel; the head-room stays ours."""
        num_blocks = num_blocks_for_tokens(sequence.num_tokens, self._config.block_size)
        block_ids = sequence.block_table.block_ids[sequence.num_registered_blocks : num_blocks]
        transfer_id, arrival, post = sequence.transfer_id, sequence.arrival, self._post

        def on_commit(handoff: Handoff, stats: TransferStats) -> None:
            post(TransferCommitted(transfer_id, arrival, handoff, stats))

        def on_fail(error: BatonError) -> None:
            post(TransferFailed(transfer_id, arrival, error))

        num_cached, timeout_s = sequence.num_cached_tokens, sequence.deadline - now
        callbacks = ReceiverCallbacks(on_commit, on_fail)
        try:
            secret = self._receiver.reserve(transfer_id, block_ids, num_cached, callbacks, timeout_s)
        except BatonError as error:
            self._end(sequence, now, error=error)
            return
        sequence.move_to(SequenceStatus.RECEIVING)
        self._receiving[transfer_id] = sequence
        target = TransferTarget(self._address, self._identity, secret, num_cached, self._pull_secret)
        self._news_of(sequence.owner).reservations.append(Reservation(transfer_id, target))

    def _join(self, sequence: DecodeSequence, handoff: Handoff, stats: TransferStats, now: float) -> None:
        """RECEIVING → RUNNING: the KV is verified. The first token went to the router from the prefill worker."""
        if handoff.num_computed_tokens != sequence.num_tokens:
            message = f"the sender committed {handoff.num_computed_tokens} tokens of {sequence.num_tokens}"
            self._give_up(sequence, BatonError(ErrorKind.CORRUPT_KV, message), now)
            return
        del self._receiving[sequence.transfer_id]
        sequence.note_transfer(stats)
        self._advance(sequence, sequence.num_uncomputed_tokens)
        sequence.decode_started_at = now
        self._run(sequence)
        firsts = {fork.transfer_id: fork for fork in handoff.forks}
        for fork in self._part(sequence, now) if sequence.forks else ():
            if (first := firsts.get(fork.transfer_id)) is not None:
                self._go_on(fork, first.first_token_id, first.finish_reason, now)
            else:
                error = BatonError(ErrorKind.LEASE_LOST, "the prefill worker had given this continuation up")
                self._give_up(fork, error, now)
        if sequence.muted:
            self._give_up(sequence, None, now)
        else:
            self._go_on(sequence, handoff.first_token_id, handoff.finish_reason, now)

    def _go_on(self, sequence: DecodeSequence, first_token_id: int, reason: FinishReason | None, now: float) -> None:
        """From the first token, which the prefill worker has drawn and told."""
        sequence.token_ids.append(first_token_id)
        finish_reason = reason or sequence.finish_reason(self._config.max_model_len)
        if finish_reason is not None:
            self._running.remove(sequence)
            self._end(sequence, now, finish_reason=finish_reason)

    def _give_up(self, sequence: DecodeSequence, error: BatonError | None, now: float) -> None:
        match sequence.status:
            case SequenceStatus.WAITING:
                self._waiting.remove(sequence)
            case SequenceStatus.RECEIVING:
                self._receiver.release(sequence.transfer_id)
                del self._receiving[sequence.transfer_id]
            case SequenceStatus.RUNNING:
                self._running.remove(sequence)
            case SequenceStatus.PREEMPTED:
                self._preempted.remove(sequence)
                self._preemptor.let_go(sequence)
        self._end(sequence, now, finish_reason=None if error else FinishReason.ABORT, error=error)

    def _pins(self) -> Counter[bytes]:
        return self._preemptor.pins(self._preempted)

    def _load_report(self) -> LoadReport:
        swapped, offered = self._preemptor.num_swapped_total, self._num_offered_total
        return replace(super()._load_report(), num_swapped_total=swapped, num_offered_total=offered)

    def _num_running(self) -> int:
        return len(self._running)

    def _num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def _num_queued_tokens(self) -> int:
        to_prefill = sum(s.num_tokens for s in self._waiting if s.prefill_here)
        to_recompute = sum(s.num_tokens for s in self._preempted)
        running = sum(s.num_uncomputed_tokens for s in self._running if s.num_uncomputed_tokens > 1)
        return to_prefill + to_recompute + running
