"""Whatever happens in whatever order on a decode worker: no block leaks, legs end once, the text is undisturbed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.messages import AbortCommand, AbortOwnerCommand
from common.engine.sequence import SequenceStatus
from common.errors import BatonError, ErrorKind
from common.rpc.worker_messages import Fork, SequenceSpec
from common.sampling_params import FinishReason
from decode_service.policy import longest
from decode_service.preemption import MAX_PREEMPTIONS
from kv_transfer.types import ForkToken
from tests.unit.engine_fakes import STOP_TOKEN, fork_spec, make_spec, reference_output, reserve
from tests.unit.test_decode_scheduler import Decode

NUM_BLOCKS = 12
CONTEXT = 40


class DecodeMachine(RuleBasedStateMachine):
    """A small pool under prompts that share prefixes, so that eviction, sharing and preemption are frequent."""

    @initialize(
        budget=st.sampled_from([3, 8, 64]), max_running=st.integers(1, 5), host_slots=st.sampled_from([0, 2, 20])
    )
    def start(self, budget: int, max_running: int, host_slots: int) -> None:
        self.d = Decode(
            num_blocks=NUM_BLOCKS,
            host_slots=host_slots,
            max_model_len=CONTEXT,
            chunk_budget_tokens=budget,
            max_running=max_running,
            max_waiting=4,
        )
        self.max_forks = max_running - 1
        self.specs: dict[str, SequenceSpec] = {}
        self.firsts: dict[str, int] = {}
        self.disturbed: set[str] = set()  # may end without their whole text

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 24),
        fork=st.integers(0, 24),
        emitted=st.integers(0, 2),
        max_tokens=st.integers(3, 16),
        here=st.booleans(),
        owner=st.integers(1, 2),
        patient=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 3]),
        num_forks=st.integers(0, 3),
    )
    def arrive(self, stem, length, fork, emitted, max_tokens, here, owner, patient, priority, num_forks) -> None:
        name = f"t{len(self.specs)}"
        tokens = [stem if i < fork else 3 + len(self.specs) % 4 for i in range(length + emitted)]
        deadline = 1e9 if patient else self.d.now + 12.0
        spec = make_spec(
            name,
            tokens,
            num_prompt_tokens=length,
            max_tokens=max_tokens,
            deadline=deadline,
            stop_token_ids=(STOP_TOKEN,),
            priority=priority,
            forks=[Fork(f"{name}.{i}", 100 + i) for i in range(0 if emitted else min(num_forks, self.max_forks))],
        )
        self.specs[name] = spec
        self.specs |= {each.transfer_id: fork_spec(spec, each) for each in spec.forks}
        if not patient:
            self.disturbed |= {name, *(each.transfer_id for each in spec.forks)}
        self.d.round(reserve(spec, owner=owner, prefill_here=here))

    def receiving(self) -> list[str]:
        return sorted(self.d.receiver.open)

    @precondition(lambda self: self.receiving())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.receiving()))
        self._commit(name)

    def _commit(self, name: str) -> None:
        spec = self.specs[name]
        expected, reason = self.expected(name)
        forks = tuple(self._fork_token(each.transfer_id) for each in spec.forks)
        self.firsts |= {each.transfer_id: each.first_token_id for each in forks}
        self.firsts[name] = self.d.commit(name, spec.token_ids, reason if len(expected) == 1 else None, forks)

    def _fork_token(self, name: str) -> ForkToken:
        expected, reason = self.expected(name)
        return ForkToken(name, expected[0], reason if len(expected) == 1 else None)

    @precondition(lambda self: self.receiving())
    @rule(data=st.data(), half=st.booleans())
    def transfer_fails(self, data: st.DataObject, half: bool) -> None:
        name = data.draw(st.sampled_from(self.receiving()))
        if half:
            self.d.receiver.land(name, self.specs[name].token_ids)
        self.disturbed |= {name, *(each.transfer_id for each in self.specs[name].forks)}
        self.d.receiver.fail(name, BatonError(ErrorKind.LEASE_LOST, "gone"))

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.specs)))
        self.disturbed.add(name)
        for owner in (1, 2):
            self.d.round(AbortCommand(owner, name))
        left = self.d.scheduler._sequences.get(name)
        assert left is None or (left.muted and left.forks), "who is given up goes on only for its forks"

    @rule(owner=st.integers(1, 2))
    def session_ends(self, owner: int) -> None:
        self.disturbed |= {s.transfer_id for s in self.d.scheduler._sequences.values() if s.owner == owner}
        self.d.round(AbortOwnerCommand(owner))
        assert all(s.owner != owner for s in self.d.scheduler._sequences.values())

    @rule(n=st.integers(1, 6))
    def rounds(self, n: int) -> None:
        for _ in range(n):
            self.d.round()

    @rule()
    def step_fails(self) -> None:
        self.d.runner.fail_next = RuntimeError("kernel")
        if self.d.round():
            self.disturbed |= set(self.specs)  # whoever was in it
        self.d.runner.fail_next = None

    @invariant()
    def no_leg_says_a_wrong_token(self) -> None:
        for name in getattr(self, "specs", {}):
            leg = self.d.leg(name)
            said = [*([self.firsts[name]] if name in self.firsts else []), *leg.tokens]
            expected, _ = self.expected(name)
            assert said == expected[: len(said)]
            index = self.specs[name].num_prompt_tokens
            start = len(self.specs[name].token_ids) - index + (name in self.firsts)
            for output in leg.outputs:
                if output.token_ids:
                    assert output.first_index == start
                    start += len(output.token_ids)
            assert leg.ended == (name not in self.d.scheduler._sequences) or not leg.outputs

    @invariant()
    def who_waits_holds_nothing(self) -> None:
        for sequence in self.d.scheduler._sequences.values() if hasattr(self, "d") else ():
            if sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED):
                assert len(sequence.block_table) == 0

    @invariant()
    def nobody_gives_way_too_often(self) -> None:
        if not hasattr(self, "d"):
            return
        for sequence in self.d.scheduler._sequences.values():
            assert sequence.num_preemptions <= MAX_PREEMPTIONS
            if sequence.is_guaranteed and sequence.status == SequenceStatus.RUNNING:
                assert not sequence.block_table.num_missing(longest(sequence, CONTEXT)), "it may have to ask again"
            assert bool(sequence.pinned_hashes) <= (sequence.status == SequenceStatus.PREEMPTED)

    def expected(self, name: str) -> tuple[list[int], FinishReason]:
        spec = self.specs[name]
        return reference_output(spec.token_ids, spec.num_prompt_tokens, spec.sampling, CONTEXT)

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        for _ in range(5000):
            for name in self.receiving():
                self._commit(name)
            if not self.d.round() and not self.d.inbox and not self.receiving():
                break
        assert self.d.scheduler.num_open == 0, "something starved"
        assert self.d.pool.num_free == NUM_BLOCKS, "blocks leaked"
        for name in self.specs:
            leg = self.d.leg(name)
            assert leg.ended, "a leg without an end"
            refused = leg.error is not None and leg.error.kind == ErrorKind.OVERLOADED
            if name not in self.disturbed and not refused:
                expected, reason = self.expected(name)
                assert leg.error is None
                assert leg.finish_reason == reason
                assert [*([self.firsts[name]] if name in self.firsts else []), *leg.tokens] == expected


TestDecodeStates = DecodeMachine.TestCase
TestDecodeStates.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
