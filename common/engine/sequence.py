"""One request's state inside one engine: tokens, blocks, progress. Mutable, and owned by one scheduler.

token_ids   | prompt ............ | output ...... |
            0                num_prompt_tokens    num_tokens
KV          | cached | computed here ...... | not yet |
            0   num_cached_tokens   num_computed_tokens
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from common.engine.batch import SamplingExtras, ScheduledSequence
from common.engine.messages import EndedLeg
from common.errors import BatonError, ErrorKind, invalid
from common.kvcache.block_hash import HASH_BYTES, chain_hashes
from common.kvcache.block_table import BlockTable
from common.rpc.worker_messages import SequenceSpec, Timings
from common.sampling_params import FinishReason
from kv_transfer.types import TransferStats

# Of the chunks of a traced prompt, these first ones are told apart.
MAX_CHUNKS_TOLD: Final = 128
# Of a prompt whose logprobs are wanted: each token's logits are kept until the step's end, 200 kB with 50 k tokens.
PROMPT_LOGPROBS_CHUNK: Final = 256


class SequenceStatus(StrEnum):
    """WAITING: holds no blocks. RECEIVING: its KV is on the way. RUNNING: takes part in steps. PREEMPTED: gave its
    blocks up, will be recomputed. SENDING: takes part in no more steps, a transfer may still read its blocks."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SENDING = "sending"
    FINISHED = "finished"


_S = SequenceStatus
LEGAL_MOVES: Final[dict[SequenceStatus, frozenset[SequenceStatus]]] = {
    _S.WAITING: frozenset({_S.RECEIVING, _S.RUNNING, _S.FINISHED}),
    _S.RECEIVING: frozenset({_S.RUNNING, _S.SENDING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.SENDING, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.SENDING: frozenset({_S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class Sequence:
    """arrival: 0, 1, 2 … in order of acceptance by this engine; the tie-break of every policy. priority: of its class,
    lower is more urgent. Times are monotonic.

    Further continuations of a prompt (worker_messages.Fork) are sequences, too. Until there is a first token they have
    no blocks and wait in the `forks` of their `leader`, which alone is computed or received; then they go their own
    ways with its blocks. muted: a leader that its router gave up, and that goes on for its forks' sake.
    copy_source: a shared block that the next step copies from, before the sequence writes to its own copy.
    """

    __slots__ = (
        "arrival",
        "arrived_at",
        "block_hashes",
        "block_size",
        "block_table",
        "chunks",
        "copy_source",
        "deadline",
        "decode_started_at",
        "first_token_at",
        "forks",
        "hash_seed",
        "leader",
        "muted",
        "next_prompt_logprob",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_overtaken",
        "num_prompt_tokens",
        "num_registered_blocks",
        "owner",
        "priority",
        "request_id",
        "sampling",
        "shares_tail",
        "started_at",
        "status",
        "token_ids",
        "traceparent",
        "transfer_bytes",
        "transfer_id",
        "transfer_s",
        "transferred_at",
    )

    def __init__(self, spec: SequenceSpec, owner: int, arrival: int, arrived_at: float, block_size: int) -> None:
        self.transfer_id = spec.transfer_id
        self.request_id = spec.request_id
        self.owner = owner
        self.arrival = arrival
        self.priority = spec.priority
        # Later ones of more urgent classes that were admitted before it.
        self.num_overtaken = 0
        self.status = SequenceStatus.WAITING
        self.deadline = spec.deadline
        self.sampling = spec.sampling
        self.hash_seed = spec.hash_seed
        self.token_ids = list(spec.token_ids)
        self.num_prompt_tokens = spec.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_size = block_size
        self.block_table = BlockTable(block_size)
        self.block_hashes: list[bytes] = []
        # Leading blocks that the prefix cache knows: matched, or offered to it.
        self.num_registered_blocks = 0
        self.leader: Sequence | None = None
        self.forks: list[Sequence] = []
        self.muted = False
        # The block of the next token may have other users, too.
        self.shares_tail = False
        self.copy_source: int | None = None
        # First prompt token whose logprobs are still to be told.
        self.next_prompt_logprob = spec.num_prompt_tokens if spec.sampling.prompt_logprobs is None else 1
        self.arrived_at = arrived_at
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.decode_started_at: float | None = None
        self.transfer_s = 0.0
        self.transfer_bytes = 0
        self.transferred_at: float | None = None
        self.traceparent = spec.traceparent
        # (end, tokens computed by then) of each chunk; kept where the request is traced.
        self.chunks: list[tuple[float, int]] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the whole output so far; also the index of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    def move_to(self, status: SequenceStatus) -> None:
        """Raises RuntimeError for a move that LEGAL_MOVES does not name."""
        if status not in LEGAL_MOVES[self.status]:
            raise RuntimeError(f"sequence {self.transfer_id}: illegal move {self.status} → {status}")
        self.status = status

    def next_chunk(self, max_tokens: int) -> ScheduledSequence:
        """The next ≤ max_tokens uncomputed tokens as a share of a step. It samples where it reaches the last token."""
        start = self.num_computed_tokens
        if self.wants_prompt_logprobs:
            max_tokens = min(max_tokens, PROMPT_LOGPROBS_CHUNK)
        token_ids = self.token_ids[start : start + max_tokens]
        end = start + len(token_ids)
        return ScheduledSequence(
            token_ids=token_ids,
            start=start,
            block_table=self.block_table.covering(end),
            sampling=self.sampling if end == len(self.token_ids) else None,
            output_index=self.num_output_tokens,
            copy=None
            if self.copy_source is None
            else (self.copy_source, self.block_table.block_ids[start // self.block_size]),
            extras=self._extras(start, end) if self.forks or self.sampling.needs_extras else None,
        )

    @property
    def tail_index(self) -> int:
        """Number of the block that the next computed token goes to."""
        return self.num_computed_tokens // self.block_size

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.next_prompt_logprob < self.num_prompt_tokens

    def _extras(self, start: int, end: int) -> SamplingExtras:
        targets = self.token_ids[start + 1 : min(end + 1, self.num_prompt_tokens)] if self.wants_prompt_logprobs else ()
        return SamplingExtras(
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            fork_seeds=tuple(fork.sampling.seed for fork in self.forks),
            prompt_targets=targets,
            num_prompt_logprobs=self.sampling.prompt_logprobs or 0,
        )

    def note_chunk(self, now: float) -> None:
        if self.traceparent and len(self.chunks) < MAX_CHUNKS_TOLD:
            self.chunks.append((now, self.num_computed_tokens))

    def note_transfer(self, stats: TransferStats) -> None:
        self.transfer_s, self.transfer_bytes, self.transferred_at = stats.seconds, stats.num_bytes, stats.ended_at

    def extend_hashes(self) -> None:
        """Bring block_hashes up to all full blocks of token_ids. O(new tokens)."""
        done = len(self.block_hashes)
        if len(self.token_ids) // self.block_size > done:
            parent = self.block_hashes[-1] if done else self.hash_seed
            new_tokens = self.token_ids[done * self.block_size :]
            self.block_hashes += chain_hashes(parent, new_tokens, self.block_size)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Whether the last of token_ids, an output token, ends the sequence."""
        reason = self.sampling.finish_reason(self.token_ids[-1], self.num_output_tokens)
        if reason is None and len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return reason

    def timings(self, now: float) -> Timings:
        """What the leg's last frame says, `now` being its end."""
        started = now if self.started_at is None else self.started_at
        return Timings(
            queue_s=started - self.arrived_at,
            prefill_s=0.0 if self.first_token_at is None else self.first_token_at - started,
            transfer_s=self.transfer_s,
            transfer_bytes=self.transfer_bytes,
            overlap_s=self._overlap_s(),
            decode_s=0.0 if self.decode_started_at is None else now - self.decode_started_at,
        )

    def _overlap_s(self) -> float:
        if self.first_token_at is None or self.transferred_at is None:
            return 0.0
        before_first_token = self.first_token_at - (self.transferred_at - self.transfer_s)
        return min(max(0.0, before_first_token), self.transfer_s)

    def ended_leg(self, now: float, phase: SequenceStatus, error: BatonError | None, *, aborted: bool) -> EndedLeg:
        """phase: the status that the end came upon."""
        return EndedLeg(
            request_id=self.request_id,
            transfer_id=self.transfer_id,
            traceparent=self.traceparent,
            phase=phase,
            error=error,
            aborted=aborted,
            num_tokens=len(self.token_ids),
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            arrived_at=self.arrived_at,
            ended_at=now,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            decode_started_at=self.decode_started_at,
            transferred_at=self.transferred_at,
            transfer_s=self.transfer_s,
            transfer_bytes=self.transfer_bytes,
            chunks=tuple(self.chunks),
        )


def check_spec(spec: SequenceSpec, vocab_size: int, max_model_len: int) -> BatonError | None:
    """Why this engine can't run `spec`, or None. Users' errors ended at the gateway; this keeps the engine unharmed."""
    num_tokens, num_prompt_tokens, max_tokens = len(spec.token_ids), spec.num_prompt_tokens, spec.sampling.max_tokens
    num_output_tokens = num_tokens - num_prompt_tokens
    if spec.forks and num_output_tokens:
        return invalid("a prompt with an answer already begun has no forks")
    if not 1 <= num_prompt_tokens <= num_tokens:
        return invalid(
            f"num_prompt_tokens is {num_prompt_tokens}: it must be 1 to {num_tokens}, the number of token ids"
        )
    if len(spec.hash_seed) != HASH_BYTES:
        return invalid(f"hash_seed has {len(spec.hash_seed)} bytes: it must have {HASH_BYTES}")
    largest = max(spec.token_ids)
    if largest >= vocab_size or min(spec.token_ids) < 0:
        return invalid(f"token id {largest} is outside the model's vocabulary of {vocab_size}", "prompt")
    named = [*spec.sampling.stop_token_ids, *(token_id for token_id, _ in spec.sampling.logit_bias)]
    if any(not 0 <= token_id < vocab_size for token_id in named):
        return invalid(f"stop_token_ids or logit_bias name a token outside the model's vocabulary of {vocab_size}")
    if num_output_tokens >= max_tokens:
        return invalid(
            f"{num_output_tokens} tokens of max_tokens {max_tokens} were emitted already: nothing is left to do"
        )
    if num_tokens >= max_model_len:
        return BatonError(
            ErrorKind.CONTEXT_LENGTH,
            f"this worker's maximum context length is {max_model_len} tokens: {num_tokens} leave none for the answer",
            param="prompt",
        )
    return None
