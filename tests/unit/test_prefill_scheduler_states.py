"""Whatever happens in whatever order on a prefill worker: no block leaks, or is overwritten while it is being sent,
lent or pulled into; and a pull that comes late, in part or not at all changes no token."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.engine.messages import AbortCommand, LendCommand
from common.errors import BatonError, ErrorKind
from common.kvcache.block_hash import chain_hashes
from common.rpc.worker_messages import Fork, SequenceSpec
from tests.unit.engine_fakes import SEED, STATS, fork_spec, make_source, make_spec, make_target, next_token, prefill
from tests.unit.test_prefill_scheduler import Prefill

NUM_BLOCKS = 10
BLOCK_SIZE = 4
CONTEXT = 40


class PrefillMachine(RuleBasedStateMachine):
    """Transfers gather late and end at any time; prompts share prefixes in a small pool."""

    @initialize(
        budget=st.sampled_from([3, 8, 64]), max_running=st.integers(1, 4), host_slots=st.sampled_from([0, 2, 20])
    )
    def start(self, budget: int, max_running: int, host_slots: int) -> None:
        self.p = Prefill(
            num_blocks=NUM_BLOCKS,
            host_slots=host_slots,
            max_model_len=CONTEXT,
            chunk_budget_tokens=budget,
            max_running=max_running,
            max_waiting=4,
        )
        self.specs: dict[str, SequenceSpec] = {}
        self.loans: dict[str, tuple[list[int], list[int | BatonError]]] = {}
        self.max_forks = max_running - 1
        self.disturbed: set[str] = set()

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 30),
        fork=st.integers(0, 30),
        max_tokens=st.integers(1, 3),
        cached_blocks=st.integers(0, 8),
        patient=st.booleans(),
        pullable=st.sampled_from([0, 0, 7, 40]),
        priority=st.sampled_from([0, 0, -1, 3]),
        num_forks=st.integers(0, 3),
    )
    def arrive(self, stem, length, fork, max_tokens, cached_blocks, patient, pullable, priority, num_forks) -> None:
        name = f"t{len(self.specs)}"
        tokens = [stem if i < fork else 3 + len(self.specs) % 4 for i in range(length)]
        deadline = 1e9 if patient else self.p.now + 6.0
        forks = [Fork(f"{name}.{i}", 100 + i) for i in range(min(num_forks, self.max_forks))]
        self.specs[name] = make_spec(
            name, tokens, max_tokens=max_tokens, deadline=deadline, forks=forks, priority=priority
        )
        self.specs |= {each.transfer_id: fork_spec(self.specs[name], each) for each in forks}
        if not patient:
            self.disturbed |= {name, *(each.transfer_id for each in forks)}
        cached = min(cached_blocks * BLOCK_SIZE, length // BLOCK_SIZE * BLOCK_SIZE)
        sources = (make_source(pullable),) if pullable else ()
        self.p.round(prefill(self.specs[name], num_cached_tokens=cached, sources=sources))

    def open_transfers(self) -> list[str]:
        return sorted(name for name, t in self.p.sender.transfers.items() if not t.ended and name in self.specs)

    def open_loans(self) -> list[str]:
        return sorted(name for name, t in self.p.sender.transfers.items() if not t.ended and name not in self.specs)

    @precondition(lambda self: self.p.puller.open)
    @rule(data=st.data(), how=st.sampled_from(["all", "one block", "spoiled", "late"]))
    def a_pull_ends(self, data: st.DataObject, how: str) -> None:
        pull = data.draw(st.sampled_from(sorted(self.p.puller.open)))
        if how in ("all", "one block"):
            tokens = self.specs[pull.removesuffix("~pull")].token_ids
            self.p.puller.commit(pull, tokens, 1 if how == "one block" else None)
            return
        if how == "spoiled":
            self.p.puller.spoil(pull)
        kind = ErrorKind.CORRUPT_KV if how == "spoiled" else ErrorKind.DEADLINE_EXCEEDED
        self.p.puller.fail(pull, BatonError(kind, how))

    @precondition(lambda self: self.p.puller.open)
    @rule(data=st.data())
    def a_piece_of_a_pull_lands(self, data: st.DataObject) -> None:
        self.p.puller.spoil(data.draw(st.sampled_from(sorted(self.p.puller.open))))

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def another_worker_asks_for_a_prefix(self, data: st.DataObject) -> None:
        spec = self.specs[data.draw(st.sampled_from(sorted(self.specs)))]
        hashes = tuple(chain_hashes(SEED, spec.token_ids, BLOCK_SIZE)) or (bytes(16),)
        loan = f"loan{len(self.loans)}"
        answers: list[int | BatonError] = []
        self.loans[loan] = (list(spec.token_ids), answers)
        self.p.round(LendCommand(loan, hashes, make_target(), 1e9, answers.append))
        assert len(answers) == 1
        assert isinstance(answers[0], BatonError) == (loan not in self.p.sender.transfers)

    @precondition(lambda self: self.open_loans())
    @rule(data=st.data())
    def a_loan_ends(self, data: st.DataObject) -> None:
        self._end_loan(data.draw(st.sampled_from(self.open_loans())))

    def _end_loan(self, loan: str) -> None:
        transfer, (tokens, answers) = self.p.transfer(loan), self.loans[loan]
        transfer.gather()
        sent = [t for block in transfer.gathered for t in block]
        assert sent == tokens[: len(sent)], "foreign KV was lent"
        assert len(transfer.gathered) == answers[0]
        transfer.end(STATS)

    @precondition(lambda self: self.open_transfers())
    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        self._gather(data.draw(st.sampled_from(self.open_transfers())))

    @precondition(lambda self: self.open_transfers())
    @rule(data=st.data(), succeed=st.booleans())
    def transfer_ends(self, data: st.DataObject, succeed: bool) -> None:
        name = data.draw(st.sampled_from(self.open_transfers()))
        transfer = self.p.transfer(name)
        if succeed and transfer.handoff is not None and not transfer.aborted:
            self._succeed(name)
        else:
            self.disturbed |= {name, *(each.transfer_id for each in self.specs[name].forks)}
            transfer.end(BatonError(ErrorKind.LEASE_LOST, "gone"))

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.specs)))
        self.disturbed.add(name)
        self.p.round(AbortCommand(1, name))

    @rule(n=st.integers(1, 4))
    def rounds(self, n: int) -> None:
        for _ in range(n):
            self.p.round()

    @rule()
    def step_fails(self) -> None:
        self.p.runner.fail_next = RuntimeError("kernel")
        if self.p.round():
            self.disturbed |= set(self.specs)
        self.p.runner.fail_next = None

    @invariant()
    def first_tokens_are_right_and_legs_end_once(self) -> None:
        for name, spec in getattr(self, "specs", {}).items():
            leg = self.p.leg(name)
            assert leg.tokens in ([], [next_token(spec.token_ids, spec.sampling.seed)])
            assert leg.ended == (name not in self.p.scheduler._sequences) or not leg.outputs

    def _gather(self, name: str) -> None:
        transfer = self.p.transfer(name)
        transfer.gather()
        tokens = self.specs[name].token_ids
        skip = transfer.target.num_cached_tokens
        sent = [t for block in transfer.gathered for t in block][: len(tokens) - skip]
        assert sent == tokens[skip : skip + len(sent)], "foreign or missing KV was sent"

    def _succeed(self, name: str) -> None:
        """A receiver commits only what is complete."""
        self._gather(name)
        transfer = self.p.transfer(name)
        assert len(transfer.pushed) == transfer.expected_num_blocks
        assert transfer.handoff is not None
        assert transfer.handoff.num_computed_tokens == len(self.specs[name].token_ids)
        for fork in transfer.handoff.forks:
            spec = self.specs[fork.transfer_id]
            assert fork.first_token_id == next_token(spec.token_ids, spec.sampling.seed)
        transfer.end(STATS)

    def teardown(self) -> None:
        if not hasattr(self, "p"):
            return
        for _ in range(2000):
            for loan in self.open_loans():
                self._end_loan(loan)
            for pull in sorted(self.p.puller.open):
                self.p.puller.fail(pull, BatonError(ErrorKind.DEADLINE_EXCEEDED, "too slow"))
            for name in self.open_transfers():
                transfer = self.p.transfer(name)
                if transfer.aborted:
                    transfer.end(BatonError(ErrorKind.CANCELLED, "aborted"))
                elif transfer.handoff is not None:
                    self._succeed(name)
            if not self.p.round() and not self.p.inbox and not self.open_transfers():
                break
        assert self.p.scheduler.num_open == 0, "something starved"
        assert self.p.pool.num_free == NUM_BLOCKS, "blocks leaked"
        for name, spec in self.specs.items():
            leg = self.p.leg(name)
            assert leg.ended, "a leg without an end"
            refused = leg.error is not None and leg.error.kind == ErrorKind.OVERLOADED
            if name not in self.disturbed and not refused:
                assert leg.error is None
                assert leg.tokens == [next_token(spec.token_ids, spec.sampling.seed)]


TestPrefillStates = PrefillMachine.TestCase
TestPrefillStates.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
