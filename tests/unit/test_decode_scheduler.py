"""The decode scheduler by example: reserve, join, decode, run out of blocks, resume, end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from common.engine.cost_rates import CostRates
from common.engine.messages import (
    AbortCommand,
    AbortOwnerCommand,
    Command,
    DrainCommand,
    EngineNews,
    HandBackCommand,
    Reservation,
    TransferEnded,
    TransferEvent,
)
from common.engine.runner import SampledExtras, StepResult
from common.errors import BatonError, ErrorKind
from common.kvcache.block_pool import BlockPool
from common.kvcache.host_tier import HostTier
from common.kvcache.prefix_cache import PrefixCache
from common.rpc.worker_messages import Fork, SequenceSpec
from common.sampling_params import FinishReason
from decode_service.preemption import Means
from decode_service.scheduler import DecodeScheduler
from kv_transfer.types import ForkToken, Handoff, WorkerIdentity
from tests.unit.engine_fakes import (
    STATS,
    FakeKv,
    FakeReceiver,
    FakeRunner,
    Leg,
    make_config,
    make_spec,
    next_token,
    reference_output,
    reserve,
)


class Decode:
    """A decode engine without its thread."""

    def __init__(self, num_blocks: int = 16, host_slots: int = 0, **config: Any) -> None:
        self.config = make_config(**config)
        self.pool = BlockPool(num_blocks)
        self.kv = FakeKv(num_blocks, self.config.block_size)
        host = HostTier(host_slots, self.kv) if host_slots else None
        self.cache = PrefixCache(self.pool, host)
        self.runner = FakeRunner(self.kv, self.pool)
        self.receiver = FakeReceiver(self.kv)
        self.inbox: list[TransferEvent] = []
        self.scheduler = DecodeScheduler(
            self.config,
            self.pool,
            self.cache,
            self.receiver,
            "127.0.0.1:7",
            WorkerIdentity("d0", "e0"),
            self.inbox.append,
        )
        self.now = 0.0
        self.legs: dict[str, Leg] = {}
        self.reservations: dict[str, Reservation] = {}
        self.news: EngineNews | None = None

    def round(self, *commands: Command | TransferEvent) -> int:
        """One round of the engine; returns the number of sequences in its step."""
        self.now += 1.0
        for item in [*self.inbox, *commands]:
            self.scheduler.handle(item, self.now)
        self.inbox.clear()
        self.scheduler.expire(self.now)
        scheduled = self.scheduler.schedule(self.now)
        if scheduled:
            self._check_budgets()
            try:
                tokens = self.runner.execute(scheduled)
            except RuntimeError as error:
                self.scheduler.fail_step(BatonError(ErrorKind.INTERNAL, str(error)), self.now)
            else:
                self.scheduler.complete(tokens, self.now)
        self.scheduler.check_integrity()
        self._hear()
        return len(scheduled)

    def run_until_idle(self) -> None:
        for _ in range(10_000):
            if not self.round() and not self.inbox:
                return
        raise AssertionError("the scheduler never comes to rest")

    def commit(
        self,
        transfer_id: str,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        forks: tuple[ForkToken, ...] = (),
    ) -> int:
        """The prefill worker's part: KV lands, the first token is sampled."""
        self.receiver.land(transfer_id, token_ids)
        first = next_token(token_ids)
        self.receiver.commit(transfer_id, Handoff(len(token_ids), first, finish_reason, forks))
        return first

    def leg(self, transfer_id: str) -> Leg:
        return self.legs.setdefault(transfer_id, Leg())

    def _hear(self) -> None:
        news = self.scheduler.take_news(None)
        if news is None:
            return
        self.news = news
        for owner_news in news.by_owner.values():
            self.reservations |= {r.transfer_id: r for r in owner_news.reservations}
            for output in owner_news.outputs:
                assert output.first_index >= 0
                self.leg(output.transfer_id).outputs.append(output)
                assert self.leg(output.transfer_id).ended in (True, False)

    def _check_budgets(self) -> None:
        step = self.scheduler._step
        chunk_tokens = sum(len(c.token_ids) for _, c in step if len(c.token_ids) > 1)
        assert chunk_tokens <= self.config.chunk_budget_tokens
        active = [*self.scheduler._running, *self.scheduler._receiving.values()]
        assert len(step) <= sum(1 + len(s.forks) for s in active) <= self.config.max_running


PROMPT = [1, 2, 3, 4, 5, 6]


def test_a_reserved_sequence_decodes_on_from_the_first_token_without_saying_it_again():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT, max_tokens=5)))
    target = d.reservations["a"].target
    assert (target.address, target.worker, target.num_cached_tokens) == ("127.0.0.1:7", WorkerIdentity("d0", "e0"), 0)
    first = d.commit("a", PROMPT)
    d.run_until_idle()
    expected, reason = reference_output(PROMPT, len(PROMPT), make_spec("a", PROMPT, max_tokens=5).sampling, 64)
    assert [first, *d.leg("a").tokens] == expected
    assert d.leg("a").finish_reason == reason
    assert d.leg("a").outputs[0].first_index == 1
    assert d.pool.num_free == d.pool.num_blocks
    last = d.leg("a").outputs[-1]
    assert last.leg_ended
    assert last.timings is not None
    assert last.timings.transfer_s == STATS.seconds
    assert last.timings.transfer_bytes == STATS.num_bytes


def test_prefill_here_computes_in_chunks_and_says_the_first_token_too():
    d = Decode(chunk_budget_tokens=4)
    prompt = list(range(10))
    d.round(reserve(make_spec("a", prompt, max_tokens=3), prefill_here=True))
    d.run_until_idle()
    expected, _ = reference_output(prompt, 10, make_spec("a", prompt, max_tokens=3).sampling, 64)
    assert d.leg("a").tokens == expected
    assert d.leg("a").outputs[0].first_index == 0
    assert [[len(s.token_ids) for s in step] for step in d.runner.steps] == [[4], [4], [2], [1], [1]]
    assert "a" not in d.reservations


def test_sequences_join_and_leave_between_steps_and_decodes_come_first():
    d = Decode(chunk_budget_tokens=4)
    d.round(reserve(make_spec("a", PROMPT, max_tokens=9)))
    d.commit("a", PROMPT)
    d.round(reserve(make_spec("b", list(range(20, 28)), max_tokens=2), prefill_here=True))
    assert [len(s.token_ids) for s in d.runner.steps[-1]] == [1, 4]
    d.round()
    assert [len(s.token_ids) for s in d.runner.steps[-1]] == [1, 4]
    d.round()
    assert [len(s.token_ids) for s in d.runner.steps[-1]] == [1, 1]
    d.round()
    assert d.leg("b").ended
    assert [len(s.token_ids) for s in d.runner.steps[-1]] == [1]


def test_only_the_blocks_that_are_not_cached_travel():
    d = Decode()
    prompt = list(range(10))
    d.round(reserve(make_spec("a", prompt, max_tokens=2)))
    d.commit("a", prompt)
    d.run_until_idle()
    d.round(reserve(make_spec("b", [*prompt[:8], 40, 41, 42], max_tokens=2)))
    assert d.reservations["b"].target.num_cached_tokens == 8
    assert len(d.receiver.open["b"].block_ids) == 1
    d.commit("b", [*prompt[:8], 40, 41, 42])
    d.run_until_idle()
    assert d.leg("b").outputs[-1].num_cached_tokens == 8


def test_a_prompt_of_whole_cached_blocks_needs_no_block_at_all():
    d = Decode()
    prompt = list(range(8))
    for name in ("a", "b"):
        d.round(reserve(make_spec(name, prompt, max_tokens=4)))
        if name == "b":
            assert d.receiver.open["b"].block_ids == []
            assert d.reservations["b"].target.num_cached_tokens == 8
        d.commit(name, prompt)
        d.run_until_idle()
    assert d.leg("a").tokens == d.leg("b").tokens


def test_a_second_chat_turn_finds_what_decode_has_filled():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT, max_tokens=8)))
    first = d.commit("a", PROMPT)
    d.run_until_idle()
    history = [*PROMPT, first, *d.leg("a").tokens]
    d.round(reserve(make_spec("b", [*history, 3, 3], max_tokens=2)))
    # The last token's KV was never computed: nothing came after it.
    assert d.reservations["b"].target.num_cached_tokens == (len(history) - 1) // 4 * 4


def test_nothing_enters_the_cache_before_the_commit():
    d = Decode()
    prompt = list(range(8))
    d.round(reserve(make_spec("a", prompt)))
    d.receiver.land("a", prompt)
    d.round(reserve(make_spec("b", prompt)))
    assert d.reservations["b"].target.num_cached_tokens == 0
    d.receiver.fail("a", BatonError(ErrorKind.CORRUPT_KV, "checksum"))
    d.round()
    assert len(d.cache) == 0


def test_a_first_token_that_ended_the_request_leaves_only_cache():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT, max_tokens=1)))
    d.commit("a", PROMPT, FinishReason.LENGTH)
    assert d.round() == 0
    leg = d.leg("a")
    assert (leg.tokens, leg.finish_reason, leg.ended) == ([], FinishReason.LENGTH, True)
    assert d.pool.num_free == d.pool.num_blocks
    assert len(d.cache) == 1


def test_a_first_token_that_fills_the_context_ends_the_leg():
    d = Decode(max_model_len=7)
    d.round(reserve(make_spec("a", PROMPT, max_tokens=50)))
    d.commit("a", PROMPT)
    assert d.round() == 0
    assert d.leg("a").finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("stage", ["waiting", "receiving", "running", "preempted"])
def test_an_abort_frees_the_blocks_within_the_round_at_every_stage(stage):
    d = Decode(num_blocks=16, max_running=2)
    if stage == "waiting":
        d.round(*[reserve(make_spec(name, PROMPT)) for name in ("x", "y")])
    d.round(reserve(make_spec("a", PROMPT, max_tokens=40)))
    if stage in ("running", "preempted"):
        d.commit("a", PROMPT)
        d.round()
    if stage == "preempted":
        d.scheduler._preempt(d.scheduler._running[0], Means.RECOMPUTE)
    before = d.pool.num_free
    d.round(AbortCommand(1, "a"))
    assert d.leg("a").finish_reason == FinishReason.ABORT
    assert d.leg("a").ended
    assert "a" not in d.receiver.open
    if stage != "preempted":
        assert d.pool.num_free >= before
    d.round(AbortOwnerCommand(1))
    assert d.pool.num_free == d.pool.num_blocks
    assert d.scheduler.num_open == 0


def test_only_its_own_session_can_abort_a_sequence():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT), owner=1), reserve(make_spec("b", PROMPT), owner=2))
    d.round(AbortCommand(2, "a"))
    assert not d.leg("a").ended
    d.round(AbortOwnerCommand(1))
    assert d.leg("a").ended
    assert not d.leg("b").ended


def test_a_failed_transfer_ends_the_leg_with_its_kind_and_frees_the_blocks():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT)))
    d.receiver.fail("a", BatonError(ErrorKind.LEASE_LOST, "the sender fell silent"))
    d.round()
    error = d.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.LEASE_LOST
    assert d.pool.num_free == d.pool.num_blocks


def test_a_commit_of_another_length_is_corrupt_kv():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT)))
    d.receiver.commit("a", Handoff(len(PROMPT) - 1, 3))
    d.round()
    error = d.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.CORRUPT_KV
    assert len(d.cache) == 0


def test_a_late_commit_for_an_ended_sequence_is_counted_and_dropped():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT)))
    callbacks = d.receiver.open["a"].callbacks
    d.round(AbortCommand(1, "a"))
    callbacks.on_commit(Handoff(len(PROMPT), 3), STATS)
    d.round(reserve(make_spec("a", PROMPT)))  # the same id again: not the same sequence
    callbacks.on_fail(BatonError(ErrorKind.LEASE_LOST, "late"))
    d.round(TransferEnded("a", 0, STATS))
    assert d.scheduler.num_open == 1
    assert d.news is not None
    assert d.news.load.num_dropped_events_total == 3


def test_without_room_a_reservation_waits_its_turn_and_gets_in_when_blocks_return():
    d = Decode(num_blocks=6, max_model_len=24)
    long = list(range(14))
    d.round(reserve(make_spec("a", long, max_tokens=8)))
    d.round(reserve(make_spec("b", long[::-1], max_tokens=8)), reserve(make_spec("c", [1], max_tokens=2)))
    assert set(d.reservations) == {"a"}  # c would fit, but b is first
    d.round(AbortCommand(1, "a"))
    assert set(d.reservations) == {"a", "b", "c"}


def test_beyond_max_waiting_a_reservation_is_refused_as_overload():
    d = Decode(max_running=1, max_waiting=1)
    d.round(*[reserve(make_spec(name, PROMPT)) for name in ("a",)])
    d.round(*[reserve(make_spec(name, PROMPT)) for name in ("b", "c")])
    error = d.leg("c").error
    assert error is not None
    assert error.kind == ErrorKind.OVERLOADED
    assert error.retry_after_s is not None
    assert not d.leg("b").ended


def test_a_deadline_ends_a_sequence_wherever_it_is():
    d = Decode(max_running=2)
    d.round(*[reserve(make_spec(name, PROMPT, deadline=5.0, max_tokens=50)) for name in ("a", "b", "c")])
    d.commit("a", PROMPT)
    d.run_until_idle()
    while d.now < 5.0:
        d.round()
    for name in ("a", "b", "c"):
        error = d.leg(name).error
        assert error is not None, name
        assert error.kind == ErrorKind.DEADLINE_EXCEEDED
    assert d.scheduler.earliest_deadline == inf
    assert d.receiver.open == {}
    assert d.pool.num_free == d.pool.num_blocks


def test_a_used_transfer_id_and_a_draining_worker_refuse():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT)))
    d.round(reserve(make_spec("a", PROMPT), owner=2))
    assert d.leg("a").error is not None
    assert d.scheduler.num_open == 1
    d.round(DrainCommand(), reserve(make_spec("b", PROMPT)))
    error = d.leg("b").error
    assert error is not None
    assert error.kind == ErrorKind.DRAINING


def test_a_receiver_that_refuses_costs_nothing():
    d = Decode()
    d.receiver.refuse = BatonError(ErrorKind.OVERLOADED, "no landing slots")
    d.round(reserve(make_spec("a", PROMPT)))
    error = d.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.OVERLOADED
    assert d.pool.num_free == d.pool.num_blocks


def test_when_blocks_run_out_somebody_gives_way_and_resumes_with_the_same_text():
    d = Decode(num_blocks=8, max_model_len=32)
    prompts = {name: [i, *range(10, 15)] for i, name in enumerate("abc")}
    firsts = {}
    for name, prompt in prompts.items():
        d.round(reserve(make_spec(name, prompt, max_tokens=14)))
        if name in d.reservations:
            firsts[name] = d.commit(name, prompt)
    while len(firsts) < 3 or d.scheduler.num_open:
        d.round()
        for name in d.reservations.keys() - firsts.keys():
            firsts[name] = d.commit(name, prompts[name])
    assert d.news is not None
    assert d.news.load.num_preemptions_total > 0
    for name, prompt in prompts.items():
        expected, _ = reference_output(prompt, 6, make_spec(name, prompt, max_tokens=14).sampling, 32)
        assert [firsts[name], *d.leg(name).tokens] == expected
    assert d.pool.num_free == d.pool.num_blocks


def test_the_same_trace_preempts_the_same_sequences():
    def trace() -> list[list[int]]:
        d = Decode(num_blocks=8, max_model_len=32)
        for i in range(4):
            d.round(reserve(make_spec(str(i), [i] * 6, max_tokens=16), prefill_here=True))
        d.run_until_idle()
        return [[len(s.token_ids) for s in step] for step in d.runner.steps]

    assert trace() == trace()


def test_what_was_preempted_before_its_last_token_resumes_for_it():
    d = Decode(num_blocks=8, max_model_len=32)
    d.round(reserve(make_spec("a", PROMPT, max_tokens=3)))
    first = d.commit("a", PROMPT)
    d.round()
    assert len(d.leg("a").tokens) == 1
    d.scheduler._preempt(d.scheduler._running[0], Means.RECOMPUTE)
    d.run_until_idle()
    expected, _ = reference_output(PROMPT, 6, make_spec("a", PROMPT, max_tokens=3).sampling, 32)
    assert [first, *d.leg("a").tokens] == expected
    assert d.leg("a").outputs[-1].first_index == 2


def test_kv_that_arrives_when_no_block_is_left_is_not_lost():
    """Everything but the prompt's own blocks is taken when the commit comes: the sequence computes again, later."""
    d = Decode(num_blocks=4, max_model_len=16, max_running=2)
    d.round(reserve(make_spec("a", [1] * 6, max_tokens=9), prefill_here=True))
    d.round(reserve(make_spec("b", [2] * 3, max_tokens=1)))  # one block, no head-room needed
    while d.pool.num_free:
        d.round()
    first = d.commit("b", [2] * 3)
    d.run_until_idle()
    assert d.leg("a").ended
    assert d.leg("b").ended
    assert first == next_token([2] * 3)


def test_new_work_does_not_overtake_what_was_preempted():
    d = Decode(num_blocks=8, max_model_len=32)
    specs = make_spec("a", [1] * 12, max_tokens=15), make_spec("b", [2] * 10, max_tokens=15)
    d.round(*(reserve(spec, prefill_here=True) for spec in specs))
    while not d.scheduler._preempted:
        d.round()
    d.round(reserve(make_spec("c", [3], max_tokens=2), prefill_here=True))
    while not d.leg("a").ended:
        assert not d.leg("c").outputs
        d.round()
    d.run_until_idle()
    assert d.leg("b").ended
    assert d.leg("c").ended


def test_a_failing_step_fails_its_sequences_and_the_next_go_on():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT), prefill_here=True))
    d.runner.fail_next = RuntimeError("kernel")
    d.round()
    error = d.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.INTERNAL
    assert d.pool.num_free == d.pool.num_blocks
    d.round(reserve(make_spec("b", PROMPT, max_tokens=2), prefill_here=True))
    d.run_until_idle()
    assert d.leg("b").finish_reason is not None


def test_what_runs_waits_or_receives_is_handed_back_with_all_its_blocks():
    d = Decode(max_running=2)
    d.round(*[reserve(make_spec(name, PROMPT)) for name in ("a", "b", "c")])
    d.commit("a", PROMPT)
    d.round()
    d.round(HandBackCommand())
    errors = [d.leg(name).error for name in ("a", "b", "c")]
    assert [error.kind for error in errors if error] == [ErrorKind.DRAINING] * 3
    assert (d.scheduler.num_open, d.pool.num_free) == (0, d.pool.num_blocks)


def test_stop_ends_everything():
    d = Decode(max_running=2)
    d.round(*[reserve(make_spec(name, PROMPT)) for name in ("a", "b", "c")])
    d.commit("a", PROMPT)
    d.round()
    d.scheduler.stop(BatonError(ErrorKind.DRAINING, "stopping"), d.now)
    d.round()
    assert all(d.leg(name).ended for name in ("a", "b", "c"))
    assert d.scheduler.num_open == 0
    assert d.receiver.open == {}


def test_the_load_report_counts_what_is_there():
    d = Decode(max_running=2, chunk_budget_tokens=4)
    d.round(*[reserve(make_spec(name, [i] * 10, max_tokens=9), prefill_here=True) for i, name in enumerate("abc")])
    assert d.news is not None
    load = d.news.load
    assert (load.num_running, load.num_waiting, load.num_blocks) == (2, 1, 16)
    assert load.queued_prefill_tokens == 6 + 10 + 10
    assert load.num_free_blocks == d.pool.num_free
    assert (load.prefix_queries_total, load.prefix_hits_total) == (20, 0)
    d.run_until_idle()
    assert d.news.load.queued_prefill_tokens == 0
    assert d.news.load.num_running == d.news.load.num_waiting == 0


def crowd(d: Decode, num: int, prompt_len: int, max_tokens: int, **fields) -> dict[str, list[int]]:
    """So many sequences at once, computed here; returns the undisturbed text of each."""
    specs = [make_spec(str(i), [i, *range(10, 9 + prompt_len)], max_tokens=max_tokens, **fields) for i in range(num)]
    d.round(*(reserve(spec, prefill_here=True) for spec in specs))
    return {
        spec.transfer_id: reference_output(spec.token_ids, prompt_len, spec.sampling, d.config.max_model_len)[0]
        for spec in specs
    }


@pytest.mark.parametrize("host_slots", [0, 1, 40])
def test_under_pressure_every_text_is_undisturbed_whatever_the_means(host_slots):
    d = Decode(num_blocks=10, max_model_len=40, host_slots=host_slots)
    expected = crowd(d, 4, 7, 30)
    d.run_until_idle()
    assert {name: d.leg(name).tokens for name in expected} == expected
    assert d.news is not None
    load = d.news.load
    assert load.num_preemptions_total > 0
    assert (load.num_swapped_total > 0) == (host_slots == 40), "pins need room for a whole sequence"
    assert load.num_host_blocks == host_slots
    assert d.pool.num_free == d.pool.num_blocks


def test_what_was_swapped_out_is_not_computed_again():
    """Only the last, partly filled block is; without a tier nearly all of it."""

    def computed(host_slots: int) -> int:
        d = Decode(num_blocks=10, max_model_len=40, host_slots=host_slots)
        crowd(d, 4, 7, 30)
        d.run_until_idle()
        return sum(len(s.token_ids) for step in d.runner.steps for s in step)

    least = 4 * (7 + 30 - 1)
    assert computed(40) - least < (computed(0) - least) / 2


def test_the_least_urgent_gives_way_and_the_most_urgent_never_does():
    d = Decode(num_blocks=10, max_model_len=40)
    specs = [make_spec(str(i), [i] * 7, max_tokens=30, priority=i - 1) for i in range(4)]
    d.round(*(reserve(spec, prefill_here=True) for spec in specs))
    while not d.leg("0").ended:
        d.round()
        for sequence in d.scheduler._sequences.values():
            assert sequence.priority >= 0 or not sequence.num_preemptions
    d.run_until_idle()
    assert all(d.leg(str(i)).finish_reason is FinishReason.LENGTH for i in range(4))


def test_an_urgent_newcomer_goes_before_who_was_preempted_and_one_of_its_class_does_not():
    d = Decode(num_blocks=10, max_model_len=40)
    crowd(d, 4, 7, 30)
    while not d.scheduler._preempted:
        d.round()
    d.round(reserve(make_spec("same", [40], max_tokens=1), prefill_here=True))
    assert not d.leg("same").outputs
    d.round(reserve(make_spec("urgent", [41], max_tokens=1, priority=-1), prefill_here=True))
    while not d.leg("urgent").ended:
        d.round()
    assert not d.leg("same").outputs
    d.run_until_idle()
    assert d.leg("same").ended


def test_after_a_resume_or_an_admission_nobody_gives_way_for_a_blocks_worth_of_steps():
    d = Decode(num_blocks=14, max_model_len=48, max_running=6)
    crowd(d, 6, 5, 40)
    calm_since, num_preemptions = 0, 0
    for step in range(2000):
        preempted = set(map(id, d.scheduler._preempted))
        waiting = len(d.scheduler._waiting)
        if not d.round():
            break
        total = d.news.load.num_preemptions_total if d.news else 0
        if total > num_preemptions:
            assert step - calm_since >= d.config.block_size, "preempted in a loop"
            num_preemptions = total
        if preempted - set(map(id, d.scheduler._preempted)) or len(d.scheduler._waiting) < waiting:
            calm_since = step
    assert num_preemptions > 0


def test_a_router_is_told_where_waiting_is_dearer_than_moving_and_only_then():
    def offers(step_ns: int) -> int:
        d = Decode(num_blocks=10, max_model_len=40, rates=CostRates(step_ns=step_ns))
        crowd(d, 4, 7, 30)
        d.run_until_idle()
        told = [o.num_wanted_blocks for leg in d.legs.values() for o in leg.outputs if o.num_wanted_blocks]
        assert d.news is not None
        assert d.news.load.num_offered_total == len(told)
        assert all(0 < n <= d.pool.num_blocks for n in told)
        return len(told)

    assert offers(step_ns=1) == 0
    assert offers(step_ns=1 << 30) > 0


def test_the_budget_of_chunks_follows_measured_steps():
    d = Decode(num_blocks=256, max_model_len=1024, chunk_budget_tokens=128, step_target_s=0.1)
    d.scheduler.handle(reserve(make_spec("a", [1] * 900, max_tokens=2), prefill_here=True), d.now)
    while scheduled := d.scheduler.schedule(d.now):
        d.now += 0.01 * sum(len(s.token_ids) for s in scheduled)  # ten tokens take the whole target
        d.scheduler.complete(d.runner.execute(scheduled), d.now)
    chunks = [len(step[0].token_ids) for step in d.runner.steps if len(step[0].token_ids) > 1]
    assert chunks[0] == 128
    assert chunks == sorted(chunks, reverse=True)
    assert 32 <= chunks[-2] < 48


# ---- several continuations of one prompt


def fork_tokens(names: Sequence[str], spec: SequenceSpec) -> tuple[ForkToken, ...]:
    seeds = {fork.transfer_id: fork.seed for fork in spec.forks}
    return tuple(ForkToken(name, next_token(spec.token_ids, seeds[name])) for name in names)


def forked(d: Decode, num_prompt_tokens: int = 22, max_tokens: int = 6) -> SequenceSpec:
    """One transfer, committed: "a" and its forks "b", "c" are about to run."""
    spec = make_spec("a", list(range(num_prompt_tokens)), max_tokens=max_tokens, forks=[Fork("b", 5), Fork("c", 6)])
    d.round(reserve(spec))
    assert list(d.reservations) == ["a"], "one transfer for all"
    d.commit("a", spec.token_ids, forks=fork_tokens("bc", spec))
    return spec


def test_forks_share_the_prompts_blocks_and_copy_only_the_one_they_write_to():
    d = Decode(num_blocks=16, block_size=4)
    spec = forked(d)
    d.round()
    tables = [list(d.scheduler._sequences[name].block_table.block_ids) for name in "abc"]
    assert tables[0][:5] == tables[1][:5] == tables[2][:5], "five full blocks, held by all three"
    assert len({table[5] for table in tables}) == 3, "the partly filled one is each one's own"
    head_room = 1
    assert d.pool.num_blocks - d.pool.num_free == 5 + 3 + head_room
    d.run_until_idle()
    for name, seed in zip("abc", (0, 5, 6), strict=True):
        alone = replace(spec.sampling, seed=seed)
        expected, reason = reference_output(spec.token_ids, len(spec.token_ids), alone, 64)
        assert d.leg(name).tokens == expected[1:]
        assert d.leg(name).finish_reason == reason


def test_whole_blocks_are_shared_without_any_copy():
    d = Decode(num_blocks=16, block_size=4)
    forked(d, num_prompt_tokens=20)
    d.round()
    assert all(s.copy is None for step in d.runner.steps for s in step)
    d.run_until_idle()
    assert d.pool.num_free == d.pool.num_blocks


def test_a_continuation_that_is_given_up_leaves_the_others_alone():
    d = Decode(num_blocks=16, block_size=4)
    spec = make_spec("a", list(range(10)), forks=[Fork("b", 5), Fork("c", 6)])
    d.round(reserve(spec))
    d.round(AbortCommand(1, "a"), AbortCommand(1, "c"))
    assert d.leg("c").ended
    assert not d.leg("a").ended, "its transfer is b's"
    d.commit("a", spec.token_ids, forks=fork_tokens("bc", spec))
    d.run_until_idle()
    assert d.leg("a").finish_reason == d.leg("c").finish_reason == FinishReason.ABORT
    assert d.leg("b").finish_reason == FinishReason.LENGTH
    assert len(d.leg("b").tokens) == 7


def test_with_its_last_continuation_the_transfer_is_given_up():
    d = Decode()
    d.round(reserve(make_spec("a", PROMPT, forks=[Fork("b", 5)])))
    d.round(AbortCommand(1, "a"))
    d.round(AbortCommand(1, "b"))
    assert d.scheduler.num_open == 0
    assert d.receiver.open == {}
    assert d.pool.num_free == d.pool.num_blocks


def test_a_damaged_sequence_fails_alone_and_caches_nothing():
    d = Decode()
    for name in "ab":
        d.round(reserve(make_spec(name, [ord(name) % 50] * 8), prefill_here=True))
    cached = len(d.cache)
    scheduled = d.scheduler.schedule(d.now)
    result = d.runner.execute(scheduled)
    error = BatonError(ErrorKind.INTERNAL, "not finite")
    d.scheduler.complete(StepResult([None, *result.token_ids[1:]], {0: SampledExtras(error=error)}), d.now)
    d.run_until_idle()
    assert d.leg("a").error is error
    assert d.leg("b").error is None
    assert len(d.leg("b").tokens) == 8
    assert len(d.cache) > cached
