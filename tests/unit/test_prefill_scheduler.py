"""The prefill scheduler by example: chunks under a budget, first token, push, commit, let go."""

from __future__ import annotations

from math import inf

import pytest

from common.engine.messages import (
    AbortCommand,
    AbortOwnerCommand,
    Command,
    DrainCommand,
    EngineNews,
    HandBackCommand,
    TransferEnded,
    TransferEvent,
)
from common.errors import BatonError, ErrorKind
from common.kvcache.block_pool import BlockPool
from common.kvcache.host_tier import HostTier
from common.kvcache.prefix_cache import PrefixCache
from common.sampling_params import FinishReason
from kv_transfer.types import Handoff
from prefill_service.pulls import Pulls
from prefill_service.scheduler import PrefillScheduler
from tests.unit.engine_fakes import (
    STATS,
    EagerCosts,
    FakeKv,
    FakePuller,
    FakeRunner,
    FakeSender,
    FakeTransfer,
    Leg,
    make_config,
    make_spec,
    next_token,
    prefill,
)


class Prefill:
    """A prefill engine without its thread."""

    def __init__(self, num_blocks: int = 16, host_slots: int = 0, **config: int) -> None:
        self.config = make_config(**config)
        self.pool = BlockPool(num_blocks)
        self.kv = FakeKv(num_blocks, self.config.block_size)
        host = HostTier(host_slots, self.kv) if host_slots else None
        self.cache = PrefixCache(self.pool, host)
        self.runner = FakeRunner(self.kv, self.pool)
        self.sender = FakeSender(self.kv)
        self.inbox: list[TransferEvent] = []
        self.puller = FakePuller(self.kv)
        pulls = Pulls(self.puller, EagerCosts(), self.config.block_size, 1000, self.inbox.append)
        self.scheduler = PrefillScheduler(self.config, self.pool, self.cache, self.sender, self.inbox.append, pulls)
        self.scheduler.lend_by(self.sender, self.inbox.append)
        self.now = 0.0
        self.legs: dict[str, Leg] = {}
        self.news: EngineNews | None = None

    def round(self, *commands: Command | TransferEvent) -> int:
        """One round of the engine; returns the number of tokens computed."""
        self.now += 1.0
        for item in [*self.inbox, *commands]:
            self.scheduler.handle(item, self.now)
        self.inbox.clear()
        self.scheduler.expire(self.now)
        scheduled = self.scheduler.schedule(self.now)
        num_tokens = sum(len(s.token_ids) for s in scheduled)
        assert num_tokens <= self.config.chunk_budget_tokens
        assert len(self.scheduler._running) + self.scheduler._num_pulling <= self.config.max_running
        if scheduled:
            try:
                tokens = self.runner.execute(scheduled)
            except RuntimeError as error:
                self.scheduler.fail_step(BatonError(ErrorKind.INTERNAL, str(error)), self.now)
            else:
                self.scheduler.complete(tokens, self.now)
        self.scheduler.check_integrity()
        news = self.scheduler.take_news(None)
        if news is not None:
            self.news = news
            for owner_news in news.by_owner.values():
                for output in owner_news.outputs:
                    self.leg(output.transfer_id).outputs.append(output)
                    assert self.leg(output.transfer_id).ended in (True, False)
        return num_tokens

    def run_until_idle(self) -> None:
        for _ in range(10_000):
            if not self.round() and not self.inbox:
                return
        raise AssertionError("the scheduler never comes to rest")

    def leg(self, transfer_id: str) -> Leg:
        return self.legs.setdefault(transfer_id, Leg())

    def transfer(self, transfer_id: str) -> FakeTransfer:
        return self.sender.transfers[transfer_id]

    def pushed_tokens(self, transfer_id: str) -> list[int | None]:
        transfer = self.transfer(transfer_id)
        transfer.gather()
        return [t for block in transfer.gathered for t in block]


PROMPT = [1, 2, 3, 4, 5, 6]


def test_the_first_token_goes_out_before_the_transfer_ends_and_the_leg_ends_after():
    p = Prefill()
    p.round(prefill(make_spec("a", PROMPT)))
    (output,) = p.leg("a").outputs
    assert (output.token_ids, output.first_index, output.leg_ended) == ((next_token(PROMPT),), 0, False)
    assert p.transfer("a").handoff == Handoff(len(PROMPT), next_token(PROMPT), None)
    assert p.pool.num_free == 14  # the transfer may still read
    p.transfer("a").end(STATS)
    p.round()
    last = p.leg("a").outputs[-1]
    assert last.leg_ended
    assert last.token_ids == ()
    assert last.timings is not None
    assert (last.timings.transfer_s, last.timings.transfer_bytes) == (STATS.seconds, STATS.num_bytes)
    assert p.pool.num_free == 16


def test_chunks_are_pushed_as_they_become_final_and_the_tail_with_the_last():
    p = Prefill(chunk_budget_tokens=6)
    prompt = list(range(15))
    p.round(prefill(make_spec("a", prompt)))
    assert p.transfer("a").expected_num_blocks == 4
    assert len(p.transfer("a").pushed) == 1
    p.round()
    assert len(p.transfer("a").pushed) == 3
    assert p.transfer("a").handoff is None
    p.round()
    assert len(p.transfer("a").pushed) == 4
    assert p.pushed_tokens("a")[:15] == prompt


def test_a_step_batches_in_order_of_arrival_and_cuts_only_the_last():
    p = Prefill(chunk_budget_tokens=16)
    p.round(*[prefill(make_spec(name, [i] * 7)) for i, name in enumerate("abc")])
    assert [len(s.token_ids) for s in p.runner.steps[0]] == [7, 7, 2]
    p.round(prefill(make_spec("d", [9] * 3)))
    assert [len(s.token_ids) for s in p.runner.steps[1]] == [5, 3]
    assert [p.leg(name).tokens for name in "abcd"] == [[next_token([i] * 7)] for i in range(3)] + [
        [next_token([9] * 3)]
    ]


def test_at_most_max_running_sequences_compute_at_once():
    p = Prefill(max_running=2, chunk_budget_tokens=4)
    p.round(*[prefill(make_spec(name, [i, i])) for i, name in enumerate("abc")])
    assert len(p.runner.steps[0]) == 2
    p.round()
    assert len(p.runner.steps[1]) == 1


def test_a_cached_prefix_is_reused_but_never_the_last_token():
    p = Prefill()
    prompt = list(range(8))
    p.round(prefill(make_spec("a", prompt)))
    p.transfer("a").end(STATS)
    p.round(prefill(make_spec("b", prompt)))
    assert [len(s.token_ids) for s in p.runner.steps[1]] == [4]
    assert p.pushed_tokens("b") == prompt
    p.transfer("b").end(STATS)
    p.round()
    assert p.leg("b").tokens == p.leg("a").tokens
    assert (p.leg("a").outputs[-1].num_cached_tokens, p.leg("b").outputs[-1].num_cached_tokens) == (0, 4)
    assert p.news is not None
    assert (p.news.load.prefix_queries_total, p.news.load.prefix_hits_total) == (16, 4)


def test_cached_blocks_travel_before_the_first_step():
    p = Prefill()
    p.round(prefill(make_spec("a", list(range(12)))))
    p.runner.fail_next = RuntimeError("before anything is computed")
    p.round(prefill(make_spec("b", [*range(12), 1])))
    assert p.pushed_tokens("b") == list(range(12))


def test_blocks_that_the_decode_side_holds_are_not_sent():
    p = Prefill()
    prompt = list(range(10))
    p.round(prefill(make_spec("a", prompt), num_cached_tokens=8))
    assert p.transfer("a").expected_num_blocks == 1
    assert p.pushed_tokens("a")[:2] == prompt[8:]
    p.round(prefill(make_spec("b", prompt[:8]), num_cached_tokens=8))
    assert p.transfer("b").expected_num_blocks == 0
    assert p.transfer("b").pushed == []
    assert p.transfer("b").handoff is not None


def test_the_first_tokens_index_goes_on_after_a_migration():
    p = Prefill()
    p.round(prefill(make_spec("a", PROMPT, num_prompt_tokens=4)))
    assert p.leg("a").outputs[0].first_index == 2


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH),
        ({"stop_token_ids": (next_token(PROMPT),)}, FinishReason.STOP),
    ],
)
def test_a_first_token_that_ends_the_request_says_so_to_both_sides(limits, reason):
    p = Prefill()
    p.round(prefill(make_spec("a", PROMPT, **limits)))
    handoff = p.transfer("a").handoff
    assert handoff is not None
    assert handoff.finish_reason == reason
    assert p.leg("a").finish_reason == reason
    p.transfer("a").end(STATS)
    p.round()
    assert p.leg("a").ended
    assert p.leg("a").outputs[-1].finish_reason is None


def test_a_prompt_waits_for_all_its_blocks_and_nobody_overtakes_it():
    p = Prefill(num_blocks=6, max_model_len=24, chunk_budget_tokens=64)
    p.round(prefill(make_spec("a", [1] * 12)))
    p.round(prefill(make_spec("b", [2] * 16)), prefill(make_spec("c", [3])))
    assert set(p.sender.transfers) == {"a"}
    p.transfer("a").end(STATS)
    p.round()
    assert set(p.sender.transfers) == {"a", "b", "c"}


def test_a_prompt_larger_than_the_context_is_refused_and_hurts_nobody():
    p = Prefill(num_blocks=4, max_model_len=16)
    p.round(prefill(make_spec("a", [1] * 16)), prefill(make_spec("b", [2] * 15)))
    error = p.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.CONTEXT_LENGTH
    assert p.leg("b").tokens == [next_token([2] * 15)]


def test_a_context_that_the_pool_cannot_hold_is_a_misconfiguration():
    with pytest.raises(ValueError, match="don't fit 4 blocks"):
        Prefill(num_blocks=4, max_model_len=17)


def test_an_abort_while_waiting_frees_at_once():
    p = Prefill(max_running=1, chunk_budget_tokens=4)
    p.round(prefill(make_spec("a", PROMPT)), prefill(make_spec("b", PROMPT)))
    p.round(AbortCommand(1, "b"))
    assert p.leg("b").ended
    assert p.leg("b").finish_reason == FinishReason.ABORT
    assert "b" not in p.sender.transfers


@pytest.mark.parametrize("budget", [4, 16])
def test_an_abort_holds_the_blocks_until_the_transfer_has_let_go(budget):
    p = Prefill(chunk_budget_tokens=budget)
    p.round(prefill(make_spec("a", PROMPT)))
    free = p.pool.num_free
    p.round(AbortOwnerCommand(1), AbortCommand(1, "a"))
    assert p.transfer("a").aborted
    assert p.pool.num_free == free
    assert not p.leg("a").ended
    assert p.round() == 0
    p.transfer("a").end(BatonError(ErrorKind.CANCELLED, "aborted"))
    p.round()
    leg = p.leg("a")
    assert (leg.ended, leg.error, leg.finish_reason) == (True, None, FinishReason.ABORT)
    assert p.pool.num_free == p.pool.num_blocks


@pytest.mark.parametrize("budget", [4, 16])
def test_a_failed_transfer_ends_the_leg_with_its_kind(budget):
    p = Prefill(chunk_budget_tokens=budget)
    p.round(prefill(make_spec("a", PROMPT)))
    p.transfer("a").end(BatonError(ErrorKind.LEASE_LOST, "the receiver fell silent"))
    p.round()
    error = p.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.LEASE_LOST
    assert p.pool.num_free == p.pool.num_blocks
    assert p.round() == 0


def test_a_refused_transfer_costs_nothing_and_the_next_prompt_goes_on():
    p = Prefill()
    p.sender.refuse = BatonError(ErrorKind.STALE_EPOCH, "that decode worker has restarted")
    p.round(prefill(make_spec("a", PROMPT)))
    error = p.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.STALE_EPOCH
    assert p.pool.num_free == p.pool.num_blocks
    p.sender.refuse = None
    p.round(prefill(make_spec("b", PROMPT)))
    assert p.leg("b").tokens


def test_a_deadline_gives_up_wherever_the_sequence_is_and_only_once():
    p = Prefill(max_running=1, chunk_budget_tokens=4)
    p.round(prefill(make_spec("a", PROMPT, deadline=3.0)), prefill(make_spec("b", PROMPT, deadline=3.0)))
    while p.now < 3.0:
        p.round()
    assert p.transfer("a").aborted
    p.transfer("a").end(BatonError(ErrorKind.CANCELLED, "aborted"))
    p.run_until_idle()
    for name in ("a", "b"):
        error = p.leg(name).error
        assert error is not None
        assert error.kind == ErrorKind.DEADLINE_EXCEEDED
    assert p.scheduler.earliest_deadline == inf


def test_a_late_or_duplicate_transfer_end_is_counted_and_dropped():
    p = Prefill()
    p.round(prefill(make_spec("a", PROMPT)))
    callbacks = p.transfer("a").callbacks
    p.transfer("a").end(STATS)
    p.round()
    callbacks.on_end(STATS)
    p.legs.clear()
    p.round(prefill(make_spec("a", PROMPT)), TransferEnded("a", 0, STATS), TransferEnded("z", 0, STATS))
    assert p.scheduler.num_open == 1
    assert p.news is not None
    assert p.news.load.num_dropped_events_total == 3


def test_a_failing_step_fails_its_sequences_once_their_transfers_let_go():
    p = Prefill()
    p.runner.fail_next = RuntimeError("kernel")
    p.round(prefill(make_spec("a", PROMPT)))
    assert p.transfer("a").aborted
    p.transfer("a").end(BatonError(ErrorKind.CANCELLED, "aborted"))
    p.round()
    error = p.leg("a").error
    assert error is not None
    assert error.kind == ErrorKind.INTERNAL
    assert len(p.cache) == 0


def test_a_draining_worker_refuses_new_work_and_finishes_the_old():
    p = Prefill(chunk_budget_tokens=4)
    p.round(prefill(make_spec("a", PROMPT)))
    p.round(DrainCommand(), prefill(make_spec("b", PROMPT)))
    error = p.leg("b").error
    assert error is not None
    assert error.kind == ErrorKind.DRAINING
    assert p.leg("a").tokens


def test_what_is_computed_is_sent_on_while_the_rest_is_handed_back():
    p = Prefill(chunk_budget_tokens=len(PROMPT), max_running=1)
    p.round(prefill(make_spec("a", PROMPT)))
    p.round(DrainCommand(), HandBackCommand())
    assert p.leg("a").tokens
    assert not p.leg("a").ended, "its KV is on its way"
    p.transfer("a").end(STATS)
    p.round()
    assert p.leg("a").error is None
    q = Prefill(chunk_budget_tokens=4, max_running=1)
    q.round(*[prefill(make_spec(name, PROMPT)) for name in "ab"])
    q.round(HandBackCommand())
    q.transfer("a").end(BatonError(ErrorKind.LEASE_LOST, "aborted"))
    q.round()
    errors = [q.leg(name).error for name in "ab"]
    assert [error.kind for error in errors if error] == [ErrorKind.DRAINING] * 2
    assert q.scheduler.num_open == 0


def test_the_load_report_counts_what_is_still_to_be_computed():
    p = Prefill(chunk_budget_tokens=4, max_running=1)
    p.round(*[prefill(make_spec(name, [i] * 10)) for i, name in enumerate("ab")])
    assert p.news is not None
    load = p.news.load
    assert (load.queued_prefill_tokens, load.num_running, load.num_waiting) == (16, 1, 1)
    p.run_until_idle()
    assert p.news.load.queued_prefill_tokens == 0
    assert p.news.load.num_running == 2  # sending
