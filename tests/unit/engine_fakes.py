"""Doubles for the engine's neighbours that keep real KV truth: a token is only right if every slot read was right.

A slot holds the token whose KV it would hold. The fake model reads its whole context back through the block table, so
a block that is reused, shared for writing, or committed unfilled changes the text, as it would on a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from common.engine.batch import ScheduledSequence
from common.engine.messages import LegOutput, PrefillCommand, ReserveCommand
from common.engine.runner import SampledExtras, StepResult
from common.engine.scheduler import SchedulerConfig
from common.errors import BatonError
from common.kvcache.block_hash import hash_seed
from common.kvcache.block_pool import BlockPool
from common.rpc.worker_messages import Fork, PullSource, SequenceSpec
from common.sampling_params import FinishReason, SamplingParams
from common.transfer_cost import CostEstimator
from kv_transfer.types import (
    Handoff,
    ReceiverCallbacks,
    SenderCallbacks,
    TransferStats,
    TransferTarget,
    WorkerIdentity,
)

VOCAB_SIZE = 50
STOP_TOKEN = 7
SEED = hash_seed("fake-model")
STATS = TransferStats(seconds=0.5, num_bytes=1000)


def next_token(context: Sequence[int], seed: int = 0) -> int:
    """The fake model: depends on every token of the context, on the seed, and on nothing else."""
    data = seed.to_bytes(8, "little") + b"".join(t.to_bytes(4, "little") for t in context)
    return blake2b(data, digest_size=8).digest()[0] % VOCAB_SIZE


def reference_output(
    token_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """What an undisturbed run says after `token_ids`."""
    tokens = list(token_ids)
    while True:
        tokens.append(next_token(tokens, sampling.seed))
        reason = sampling.finish_reason(tokens[-1], len(tokens) - num_prompt_tokens)
        if reason is None and len(tokens) >= max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            return tokens[len(token_ids) :], reason


class FakeKv:
    """slots[block_id][offset]: the token whose KV lies there, None if never written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: dict[int, list[int | None]] = {}

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Implements BlockCopier, as load does."""
        assert len(set(slots)) == len(slots) == len(block_ids)
        self.host |= {slot: list(self.slots[block_id]) for block_id, slot in zip(block_ids, slots, strict=True)}

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot, block_id in zip(slots, block_ids, strict=True):
            self.slots[block_id] = list(self.host[slot])

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[int | None]:
        return [self.slots[block_ids[p // self.block_size]][p % self.block_size] for p in range(num_tokens)]

    def write(self, block_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for position, token in enumerate(token_ids, start):
            self.slots[block_ids[position // self.block_size]][position % self.block_size] = token


class FakeRunner:
    """Implements Runner on a FakeKv. With a pool, checks that only blocks private to one sequence are written."""

    def __init__(self, kv: FakeKv, pool: BlockPool | None = None) -> None:
        self.kv = kv
        self.pool = pool
        self.steps: list[list[ScheduledSequence]] = []
        self.fail_next: Exception | None = None

    def execute(self, scheduled: Sequence[ScheduledSequence]) -> StepResult:
        self.steps.append(list(scheduled))
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for copy in [s.copy for s in scheduled if s.copy is not None]:
            self.kv.slots[copy[1]] = list(self.kv.slots[copy[0]])
        return StepResult([self._run(s) for s in scheduled], self._extras(scheduled))

    def _extras(self, scheduled: Sequence[ScheduledSequence]) -> dict[int, SampledExtras]:
        """A fork's first token differs by its seed."""
        extras: dict[int, SampledExtras] = {}
        for i, s in enumerate(scheduled):
            if s.extras is not None and s.sampling is not None:
                context = self.kv.read(s.block_table, s.start + len(s.token_ids))
                forks = tuple((next_token(context, seed=seed), None) for seed in s.extras.fork_seeds)  # type: ignore[arg-type]
                extras[i] = SampledExtras(forks=forks)
        return extras

    def _run(self, s: ScheduledSequence) -> int | None:
        end = s.start + len(s.token_ids)
        assert s.token_ids, "an empty chunk"
        assert len(s.block_table) == -(-end // self.kv.block_size)
        if self.pool is not None:
            for block_id in s.block_table[s.start // self.kv.block_size :]:
                assert self.pool.references(block_id) == 1, "a shared block would be written"
                assert not self.pool.is_retained(block_id), "a cached block would be written"
        self.kv.write(s.block_table, s.start, s.token_ids)
        if s.sampling is None:
            return None
        context = self.kv.read(s.block_table, end)
        assert None not in context, "KV read that was never written"
        return next_token(context, seed=s.sampling.seed)  # type: ignore[arg-type]


@dataclass
class FakeReservation:
    transfer_id: str
    block_ids: list[int]
    num_cached_tokens: int
    callbacks: ReceiverCallbacks


class FakeReceiver:
    """Implements ReservationBook; the test plays the sender."""

    def __init__(self, kv: FakeKv) -> None:
        self.kv = kv
        self.open: dict[str, FakeReservation] = {}
        self.refuse: BatonError | None = None

    def reserve(
        self,
        transfer_id: str,
        block_ids: Sequence[int],
        num_cached_tokens: int,
        callbacks: ReceiverCallbacks,
        timeout_s: float,
    ) -> bytes:
        if self.refuse is not None:
            raise self.refuse
        assert transfer_id not in self.open
        self.open[transfer_id] = FakeReservation(transfer_id, list(block_ids), num_cached_tokens, callbacks)
        return b"s" * 16

    def release(self, transfer_id: str) -> None:
        self.open.pop(transfer_id, None)

    def land(self, transfer_id: str, token_ids: Sequence[int]) -> None:
        """The KV of these tokens, the prompt's, arrives; the last block may be partly filled."""
        reservation = self.open[transfer_id]
        uncached = token_ids[reservation.num_cached_tokens :]
        assert len(reservation.block_ids) == -(-len(uncached) // self.kv.block_size)
        self.kv.write(reservation.block_ids, 0, uncached)

    def commit(self, transfer_id: str, handoff: Handoff) -> None:
        self.open.pop(transfer_id).callbacks.on_commit(handoff, STATS)

    def fail(self, transfer_id: str, error: BatonError) -> None:
        self.open.pop(transfer_id).callbacks.on_fail(error)


@dataclass
class FakePull:
    source: PullSource
    block_hashes: list[bytes]
    block_ids: list[int]
    num_held_tokens: int
    callbacks: ReceiverCallbacks
    timeout_s: float


class FakePuller:
    """Implements PrefixPuller; the test plays the owner of the prefix."""

    def __init__(self, kv: FakeKv) -> None:
        self.kv = kv
        self.open: dict[str, FakePull] = {}
        self.released: dict[str, FakePull] = {}
        self.refuse: BatonError | None = None

    def pull(
        self,
        transfer_id: str,
        source: PullSource,
        block_hashes: Sequence[bytes],
        block_ids: Sequence[int],
        num_held_tokens: int,
        callbacks: ReceiverCallbacks,
        timeout_s: float,
    ) -> None:
        if self.refuse is not None:
            raise self.refuse
        assert len(block_hashes) == len(block_ids) > 0
        assert transfer_id not in self.open
        self.open[transfer_id] = FakePull(
            source, list(block_hashes), list(block_ids), num_held_tokens, callbacks, timeout_s
        )

    def release(self, transfer_id: str) -> None:
        if (pull := self.open.pop(transfer_id, None)) is not None:
            self.released[transfer_id] = pull

    def spoil(self, transfer_id: str) -> None:
        """A piece lands that will not be verified."""
        pull = self.open[transfer_id]
        self.kv.write(pull.block_ids, 0, [-1] * (len(pull.block_ids) * self.kv.block_size))

    def commit(self, transfer_id: str, token_ids: Sequence[int], num_blocks: int | None = None) -> None:
        """The KV of the first num_blocks asked for (all, if left out) arrives, verified. token_ids: the prompt."""
        pull = self.open.pop(transfer_id)
        count = len(pull.block_ids) if num_blocks is None else num_blocks
        end = pull.num_held_tokens + count * self.kv.block_size
        self.kv.write(pull.block_ids, 0, token_ids[pull.num_held_tokens : end])
        pull.callbacks.on_commit(Handoff(end, 0), STATS)

    def fail(self, transfer_id: str, error: BatonError) -> None:
        self.open.pop(transfer_id).callbacks.on_fail(error)


class EagerCosts(CostEstimator):
    """Whatever can be pulled is."""

    def is_worth_pulling(self, num_tokens: int, token_bytes: int) -> bool:
        return num_tokens > 0

    def patience_s(self, num_tokens: int) -> float:
        return 3.0


@dataclass
class FakeTransfer:
    """Implements OutgoingTransfer; the test decides when it gathers and ends."""

    kv: FakeKv
    target: TransferTarget
    expected_num_blocks: int
    callbacks: SenderCallbacks
    pushed: list[int] = field(default_factory=list)
    gathered: list[list[int | None]] = field(default_factory=list)
    handoff: Handoff | None = None
    aborted: bool = False
    ended: bool = False

    def push(self, block_ids: Sequence[int]) -> None:
        assert not self.handoff, "pushed after commit"
        self.pushed += block_ids

    def commit(self, handoff: Handoff) -> None:
        self.handoff = handoff

    def abort(self) -> None:
        self.aborted = True

    def gather(self) -> None:
        """Copy out what was pushed and not yet copied, as late as the contract allows."""
        for block_id in self.pushed[len(self.gathered) :]:
            self.gathered.append(list(self.kv.slots[block_id]))

    def end(self, result: TransferStats | BatonError) -> None:
        assert not self.ended
        self.ended = True
        self.callbacks.on_end(result)


class FakeSender:
    """Implements TransferOpener."""

    def __init__(self, kv: FakeKv) -> None:
        self.kv = kv
        self.transfers: dict[str, FakeTransfer] = {}
        self.refuse: BatonError | None = None

    def open(
        self,
        transfer_id: str,
        target: TransferTarget,
        expected_num_blocks: int,
        callbacks: SenderCallbacks,
        timeout_s: float,
    ) -> FakeTransfer:
        if self.refuse is not None:
            raise self.refuse
        transfer = FakeTransfer(self.kv, target, expected_num_blocks, callbacks)
        self.transfers[transfer_id] = transfer
        return transfer


def make_config(**overrides: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "block_size": 4,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 64,
        "chunk_budget_tokens": 16,
        "max_running": 4,
        "max_waiting": 8,
        **overrides,
    }
    return SchedulerConfig(**values)


def make_spec(
    transfer_id: str,
    token_ids: Sequence[int],
    *,
    num_prompt_tokens: int | None = None,
    max_tokens: int = 8,
    deadline: float = 1e9,
    stop_token_ids: tuple[int, ...] = (),
    priority: int = 0,
    forks: Sequence[Fork] = (),
) -> SequenceSpec:
    return SequenceSpec(
        transfer_id=transfer_id,
        request_id=f"r-{transfer_id}",
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        hash_seed=SEED,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids),
        deadline=deadline,
        priority=priority,
        forks=tuple(forks),
    )


def fork_spec(spec: SequenceSpec, fork: Fork) -> SequenceSpec:
    """The fork as a request of its own."""
    return replace(spec, transfer_id=fork.transfer_id, sampling=replace(spec.sampling, seed=fork.seed), forks=())


def make_target(num_cached_tokens: int = 0) -> TransferTarget:
    return TransferTarget("127.0.0.1:1", WorkerIdentity("d0", "e0"), b"s" * 16, num_cached_tokens)


def reserve(spec: SequenceSpec, *, owner: int = 1, prefill_here: bool = False) -> ReserveCommand:
    return ReserveCommand(owner, spec, prefill_here)


def prefill(
    spec: SequenceSpec, *, owner: int = 1, num_cached_tokens: int = 0, sources: tuple[PullSource, ...] = ()
) -> PrefillCommand:
    return PrefillCommand(owner, spec, make_target(num_cached_tokens), sources)


def make_source(num_tokens: int, name: str = "p9") -> PullSource:
    return PullSource("127.0.0.1:9", WorkerIdentity(name, "e9"), b"p" * 16, num_tokens)


@dataclass
class Leg:
    """All that was said of one transfer id."""

    outputs: list[LegOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [t for output in self.outputs for t in output.token_ids]

    @property
    def ended(self) -> bool:
        assert sum(output.leg_ended for output in self.outputs) <= 1, "a leg ended twice"
        assert not any(output.leg_ended for output in self.outputs[:-1]), "news after the end"
        return bool(self.outputs) and self.outputs[-1].leg_ended

    @property
    def finish_reason(self) -> FinishReason | None:
        reasons = [o.finish_reason for o in self.outputs if o.finish_reason is not None]
        assert len(reasons) <= 1, "finished twice"
        return reasons[0] if reasons else None

    @property
    def error(self) -> BatonError | None:
        return self.outputs[-1].error if self.outputs else None
