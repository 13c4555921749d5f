"""Iteration-level batching of prompts, with chunked prefill under a token budget.

    WAITING ──blocks for the whole prompt──► RUNNING ──last chunk──► SENDING ──transfer ended──► FINISHED
    (by class)  transfer opened              a chunk a step;           first token is out,
                                             final blocks pushed       KV committed

A step takes chunks in order of admission until the budget is spent; only the last of them is cut. A cached prefix is
reused up to, but never including, the prompt's last token, whose logits are needed: so no block that is written to is
ever shared. Blocks that the decode side holds are computed or matched here, but not sent.
"""

from __future__ import annotations

from common.engine.batch import ScheduledSequence
from common.engine.loans import TransferOpener
from common.engine.messages import (
    Command,
    LegOutput,
    PrefillCommand,
    TransferCommitted,
    TransferEnded,
    TransferEvent,
    TransferFailed,
)
from common.engine.runner import SampledExtras, StepResult
from common.engine.scheduler import Post, SchedulerConfig, SequenceScheduler
from common.engine.sequence import SequenceStatus
from common.engine.waiting_queue import WaitingQueue
from common.errors import BatonError
from common.kvcache.block_pool import BlockPool
from common.kvcache.block_table import num_blocks_for_tokens
from common.kvcache.prefix_cache import PrefixCache
from common.logprobs import TokenLogprobs
from common.rpc.worker_messages import PullSource
from common.sampling_params import FinishReason
from kv_transfer.types import ForkToken, Handoff, OutgoingTransfer, SenderCallbacks, TransferStats
from prefill_service.pulls import Pulls
from prefill_service.sequence import PrefillSequence


class PrefillScheduler(SequenceScheduler[PrefillSequence]):
    """post: hands a transfer's end, which comes on a foreign thread, to the engine's inbox. pulls: None: every prefix
    that is not cached here is computed."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        cache: PrefixCache,
        sender: TransferOpener,
        post: Post,
        pulls: Pulls | None = None,
    ) -> None:
        super().__init__(config, pool, cache)
        self._sender = sender
        self._post = post
        self._pulls = pulls
        self._num_pulling = 0
        self._waiting: WaitingQueue[PrefillSequence] = WaitingQueue()
        self._running: list[PrefillSequence] = []

    def _handle_own(self, item: Command | TransferEvent, now: float) -> None:
        match item:
            case PrefillCommand():
                sequence = self._accept(item.spec, item.owner, now, PrefillSequence)
                if sequence is not None:
                    sequence.target = item.target
                    # What is pulled has no logits, and those of the prompt are wanted.
                    sequence.pull_sources = () if sequence.wants_prompt_logprobs else _sources_of(item)
                    self._waiting.push(sequence)
            case TransferEnded():
                sequence = self._sequences.get(item.transfer_id)
                if sequence is None or sequence.arrival != item.arrival:
                    self._drop()
                else:
                    self._on_transfer_end(sequence, item.result, now)
            case TransferCommitted() | TransferFailed():
                sequence = self._sequences.get(item.transfer_id)
                if sequence is None or sequence.arrival != item.arrival or not sequence.is_pulling:
                    self._drop()
                elif isinstance(item, TransferCommitted):
                    self._on_pulled(sequence, item, now)
                else:
                    self._compute(sequence)
            case _:
                self._drop()

    def _plan_step(self, now: float) -> list[tuple[PrefillSequence, ScheduledSequence]]:
        budget = self._chunk_tokens
        step = []
        for sequence in self._running:
            if budget == 0:
                break
            scheduled = sequence.next_chunk(budget)
            budget -= len(scheduled.token_ids)
            step.append((sequence, scheduled))
        while budget and self._waiting and len(self._running) + self._num_pulling < self._running_cap:
            sequence = self._waiting.head
            if not self._reserve_blocks(sequence):
                break
            self._waiting.pop()
            if self._start(sequence, now) and not sequence.is_pulling:
                scheduled = sequence.next_chunk(budget)
                budget -= len(scheduled.token_ids)
                step.append((sequence, scheduled))
        return step

    def _reserve_blocks(self, sequence: PrefillSequence) -> bool:
        """Blocks for all tokens whose KV is computed here; the last token is computed even if its block is cached."""
        shareable = (sequence.num_tokens - 1) // self._config.block_size
        taken = self._take_blocks(sequence, shareable, sequence.num_tokens)
        if taken is None:
            return False
        self._count_prefix_hits(sequence, taken)
        return True

    def _start(self, sequence: PrefillSequence, now: float) -> bool:
        """WAITING → RUNNING, or RECEIVING what is cheaper to pull, with an open transfer that has the cached blocks
        already. False: refused, and ended."""
        self._changed = True
        sequence.started_at = now
        num_blocks = num_blocks_for_tokens(sequence.num_tokens, self._config.block_size)
        # The decode side's blocks may have another size: a block that it has only in part is sent.
        num_held_tokens = sequence.target.num_cached_tokens
        held_blocks = (
            num_blocks if num_held_tokens >= sequence.num_tokens else num_held_tokens // self._config.block_size
        )
        sequence.num_pushed_blocks = held_blocks
        try:
            sequence.outgoing = self._open_transfer(sequence, num_blocks - sequence.num_pushed_blocks, now)
        except BatonError as error:
            self._end(sequence, now, error=error)
            return False
        self._push_blocks(sequence, sequence.num_registered_blocks)
        if self._pulls is not None and self._pulls.begin(sequence, now):
            sequence.move_to(SequenceStatus.RECEIVING)
            self._num_pulling += 1
        else:
            sequence.move_to(SequenceStatus.RUNNING)
            self._running.append(sequence)
        return True

    # A prefix that comes from another worker

    def _on_pulled(self, sequence: PrefillSequence, event: TransferCommitted, now: float) -> None:
        """Its KV is verified and in place, as far as the owner still had it."""
        if self._pulls is not None:
            self._pulls.note_done(sequence, event.stats, now)
        num_tokens = max(0, event.handoff.num_computed_tokens - sequence.num_computed_tokens)
        self._advance(sequence, num_tokens)
        sequence.num_cached_tokens += num_tokens
        self._push_blocks(sequence, sequence.num_registered_blocks)
        self._compute(sequence)

    def _compute(self, sequence: PrefillSequence) -> None:
        """RECEIVING → RUNNING: what has not come is computed here."""
        self._num_pulling -= 1
        sequence.move_to(SequenceStatus.RUNNING)
        self._running.append(sequence)

    def _stop_pulling(self, sequence: PrefillSequence) -> None:
        if sequence.is_pulling and self._pulls is not None:
            self._num_pulling -= 1
            self._pulls.release(sequence)

    def _open_transfer(self, sequence: PrefillSequence, num_blocks: int, now: float) -> OutgoingTransfer:
        transfer_id, arrival, post = sequence.transfer_id, sequence.arrival, self._post

        def on_end(result: TransferStats | BatonError) -> None:
            post(TransferEnded(transfer_id, arrival, result))

        callbacks = SenderCallbacks(on_gathered=_ignore, on_end=on_end)
        timeout_s = sequence.deadline - now
        return self._sender.open(transfer_id, sequence.target, num_blocks, callbacks, timeout_s)

    def _push_blocks(self, sequence: PrefillSequence, num_final_blocks: int) -> None:
        """Hand the transfer what has become final since the last push."""
        if sequence.outgoing is not None and num_final_blocks > sequence.num_pushed_blocks:
            block_ids = sequence.block_table.block_ids[sequence.num_pushed_blocks : num_final_blocks]
            sequence.num_pushed_blocks = num_final_blocks
            sequence.outgoing.push(block_ids)

    def complete(self, result: StepResult, now: float) -> None:
        if self._pulls is not None:
            num_tokens = sum(len(scheduled.token_ids) for _, scheduled in self._step)
            self._pulls.costs.note_step(num_tokens, now - self._step_began_at)
        super().complete(result, now)

    def _after_chunk(self, sequence: PrefillSequence, token_id: int | None, more: SampledExtras, now: float) -> None:
        sequence.note_chunk(now)
        if token_id is None:
            self._push_blocks(sequence, sequence.num_computed_tokens // self._config.block_size)
            return
        self._push_blocks(sequence, len(sequence.block_table))
        self._running.remove(sequence)
        sequence.move_to(SequenceStatus.SENDING)
        forks = tuple(
            ForkToken(fork.transfer_id, fork_token, self._first_token(fork, sequence, fork_token, logprobs, now))
            for fork, (fork_token, logprobs) in zip(self._forks_of(sequence), more.forks, strict=True)
        )
        finish_reason = self._first_token(sequence, sequence, token_id, more.logprobs, now)
        if sequence.outgoing is not None:
            sequence.outgoing.commit(Handoff(sequence.num_computed_tokens, token_id, finish_reason, forks))

    def _first_token(
        self,
        sequence: PrefillSequence,
        leader: PrefillSequence,
        token_id: int,
        logprobs: TokenLogprobs | None,
        now: float,
    ) -> FinishReason | None:
        """Straight to the router. Returns whether it ends the sequence."""
        sequence.token_ids.append(token_id)
        sequence.started_at = leader.started_at
        sequence.first_token_at = now
        finish_reason = sequence.finish_reason(self._config.max_model_len)
        first_token = LegOutput(
            transfer_id=sequence.transfer_id,
            first_index=sequence.num_output_tokens - 1,
            token_ids=(token_id,),
            finish_reason=finish_reason,
            num_cached_tokens=leader.num_cached_tokens,
            logprobs=() if logprobs is None else (logprobs,),
        )
        self._emit(sequence.owner, first_token)
        return finish_reason

    def _on_transfer_end(self, sequence: PrefillSequence, result: TransferStats | BatonError, now: float) -> None:
        self._stop_pulling(sequence)
        if sequence.status == SequenceStatus.RUNNING:
            self._running.remove(sequence)
        if isinstance(result, TransferStats):
            sequence.note_transfer(result)
        error = result if isinstance(result, BatonError) else None
        if sequence.given_up:
            error = sequence.error
        aborted = sequence.given_up and error is None
        self._end(sequence, now, finish_reason=FinishReason.ABORT if aborted else None, error=error)

    def _give_up(self, sequence: PrefillSequence, error: BatonError | None, now: float) -> None:
        if sequence.status == SequenceStatus.WAITING:
            self._waiting.remove(sequence)
            self._end(sequence, now, finish_reason=None if error else FinishReason.ABORT, error=error)
            return
        if sequence.given_up:
            return
        sequence.given_up, sequence.error = True, error
        if sequence.is_pulling:
            self._stop_pulling(sequence)
            sequence.move_to(SequenceStatus.SENDING)
        elif sequence.status == SequenceStatus.RUNNING:
            self._running.remove(sequence)
            sequence.move_to(SequenceStatus.SENDING)
        if sequence.outgoing is not None:
            sequence.outgoing.abort()

    def _is_leaving(self, sequence: PrefillSequence) -> bool:
        return sequence.status == SequenceStatus.SENDING

    def _num_running(self) -> int:
        return len(self._running)

    def _num_waiting(self) -> int:
        return len(self._waiting)

    def _num_queued_tokens(self) -> int:
        return sum(s.num_uncomputed_tokens for s in self._waiting) + sum(s.num_uncomputed_tokens for s in self._running)


def _sources_of(command: PrefillCommand) -> tuple[PullSource, ...]:
    """Whom to ask for a prefix: the router's choice, then the decode worker, which knows best what it holds."""
    target = command.target
    if not target.pull_secret:
        return command.pull_sources
    return (
        *command.pull_sources,
        PullSource(target.address, target.worker, target.pull_secret, target.num_cached_tokens),
    )


def _ignore(_: int) -> None:
    """Blocks stay referenced until the transfer's end, which follows its last gathering closely."""
