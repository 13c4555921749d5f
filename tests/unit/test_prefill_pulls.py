"""A prefix from another worker, by example: when it is asked for, what its end brings, and what is lent to others."""

from __future__ import annotations

import pytest

from common.engine.loans import MAX_SHARE
from common.engine.messages import (
    AbortCommand,
    DrainCommand,
    HandBackCommand,
    LendCommand,
    LoanEnded,
    TransferCommitted,
)
from common.errors import BatonError, ErrorKind
from common.kvcache.block_hash import chain_hashes
from common.transfer_cost import CostEstimator, TransferCost, is_worth_moving
from kv_transfer.types import Handoff
from tests.unit.engine_fakes import SEED, STATS, make_source, make_spec, make_target, next_token, prefill
from tests.unit.test_prefill_scheduler import Prefill

PROMPT = list(range(10, 30))
LOST = BatonError(ErrorKind.LEASE_LOST, "gone")


def pulling(p: Prefill, num_tokens: int = 20, **command) -> str:
    """A prompt of five blocks of which the other worker holds so many tokens; the pull's id."""
    p.round(prefill(make_spec("t", PROMPT), sources=(make_source(num_tokens),), **command))
    (pull,) = p.puller.open
    return pull


def test_all_but_the_last_tokens_block_is_pulled_and_only_the_rest_computed():
    p = Prefill()
    pull = pulling(p)
    asked = p.puller.open[pull]
    assert asked.block_hashes == chain_hashes(SEED, PROMPT, 4)[:4]
    assert p.round() == 0, "nothing is computed meanwhile"
    p.puller.commit(pull, PROMPT)
    assert p.round() == 4
    assert p.leg("t").tokens == [next_token(PROMPT)]
    assert p.leg("t").outputs[0].num_cached_tokens == 16
    transfer = p.transfer("t")
    transfer.gather()
    assert [t for block in transfer.gathered for t in block] == PROMPT


def test_blocks_that_the_owner_did_not_have_any_more_are_computed():
    p = Prefill()
    p.puller.commit(pulling(p), PROMPT, num_blocks=1)
    assert p.round() == 16
    assert p.leg("t").tokens == [next_token(PROMPT)]


@pytest.mark.parametrize("kind", [ErrorKind.DEADLINE_EXCEEDED, ErrorKind.LEASE_LOST, ErrorKind.CORRUPT_KV])
def test_a_pull_that_fails_or_comes_late_is_computed_and_its_rubbish_read_by_nobody(kind: ErrorKind):
    p = Prefill(chunk_budget_tokens=64)
    pull = pulling(p)
    p.puller.spoil(pull)
    p.puller.fail(pull, BatonError(kind, "no"))
    assert p.round() == 20
    assert p.leg("t").tokens == [next_token(PROMPT)]


def test_what_cannot_be_asked_for_is_computed_at_once():
    p = Prefill(chunk_budget_tokens=64)
    p.puller.refuse = LOST
    assert p.round(prefill(make_spec("t", PROMPT), sources=(make_source(20),))) == 20


def test_what_is_cached_here_is_not_pulled():
    p = Prefill(chunk_budget_tokens=64)
    p.round(prefill(make_spec("a", PROMPT)))
    assert p.round(prefill(make_spec("b", PROMPT), sources=(make_source(16),))) == 4
    assert not p.puller.open


def test_the_decode_worker_is_asked_for_what_it_says_it_holds():
    p = Prefill()
    command = prefill(make_spec("t", PROMPT), num_cached_tokens=12)
    object.__setattr__(command.target, "pull_secret", b"d" * 16)
    p.round(command)
    (pull,) = p.puller.open.values()
    assert (pull.source.worker.worker_id, pull.source.num_tokens, pull.source.secret) == ("d0", 12, b"d" * 16)


@pytest.mark.parametrize("end", ["abort", "transfer lost", "deadline"])
def test_a_request_that_ends_amid_a_pull_gives_its_blocks_back_after_the_pull_has_let_go(end: str):
    p = Prefill()
    p.round(prefill(make_spec("t", PROMPT, deadline=p.now + 1.5), sources=(make_source(20),)))
    (pull,) = p.puller.open
    if end == "transfer lost":
        p.transfer("t").end(LOST)
        p.round()
    else:
        p.round(*([AbortCommand(1, "t")] if end == "abort" else []))
        assert p.transfer("t").aborted
        p.transfer("t").end(LOST)
        p.round()
    assert pull in p.puller.released
    assert p.leg("t").ended
    assert p.pool.num_free == p.pool.num_blocks
    late = TransferCommitted("t", 0, Handoff(16, 0), STATS)
    p.round(late)
    assert p.scheduler._num_dropped_events_total == 1


def lend(p: Prefill, loan: str, prompt: list[int]) -> int | BatonError:
    answers: list[int | BatonError] = []
    hashes = tuple(chain_hashes(SEED, prompt, 4))
    p.round(LendCommand(loan, hashes, make_target(), 1e9, answers.append))
    (answer,) = answers
    return answer


def test_cached_blocks_are_lent_and_stay_until_nothing_reads_them():
    p = Prefill(num_blocks=32, max_model_len=128, chunk_budget_tokens=64)
    p.round(prefill(make_spec("a", PROMPT)))
    p.transfer("a").end(STATS)
    p.round()
    assert lend(p, "loan", PROMPT) == 5
    transfer = p.transfer("loan")
    assert transfer.handoff == Handoff(20, 0)
    # A prompt that needs the whole pool waits for the loan.
    whole = [7] * 126
    assert p.round(prefill(make_spec("b", whole))) == 0
    transfer.gather()
    assert [t for block in transfer.gathered for t in block] == PROMPT
    transfer.end(LOST)
    assert p.round() > 0
    p.round(LoanEnded("loan"))
    assert p.scheduler._num_dropped_events_total == 1


def test_what_was_evicted_to_host_memory_is_lent_from_there():
    p = Prefill(num_blocks=32, host_slots=32, max_model_len=128, chunk_budget_tokens=256)
    for name, prompt in (("a", PROMPT), ("b", [7] * 120)):
        p.round(prefill(make_spec(name, prompt)))
        p.transfer(name).end(STATS)
        p.round()
    hashes = chain_hashes(SEED, PROMPT, 4)
    assert any(p.cache.block_of(h) is None for h in hashes), "else this test shows nothing"
    assert lend(p, "loan", PROMPT) == 5
    transfer = p.transfer("loan")
    transfer.gather()
    assert [t for block in transfer.gathered for t in block] == PROMPT
    transfer.end(STATS)
    p.round()
    assert p.pool.num_free == p.pool.num_blocks


def test_what_is_not_cached_or_too_much_is_not_lent():
    p = Prefill(num_blocks=16, chunk_budget_tokens=64)
    assert isinstance(lend(p, "nothing", PROMPT), BatonError)
    p.round(prefill(make_spec("a", PROMPT)))
    assert lend(p, "some", PROMPT) == 16 // MAX_SHARE
    assert isinstance(lend(p, "more", PROMPT), BatonError)
    assert isinstance(lend(p, "some", PROMPT), BatonError), "an id is used once"


def test_a_loan_that_can_not_be_sent_pins_nothing():
    p = Prefill(chunk_budget_tokens=64)
    p.round(prefill(make_spec("a", PROMPT)))
    p.sender.refuse = LOST
    assert lend(p, "loan", PROMPT) is LOST
    p.scheduler.check_integrity()


def test_kv_that_others_fetch_outlives_what_is_handed_back():
    p = Prefill(chunk_budget_tokens=64)
    p.round(prefill(make_spec("a", PROMPT)))
    p.transfer("a").end(STATS)
    assert lend(p, "loan", PROMPT) == 4
    p.round(DrainCommand(), HandBackCommand())
    assert not p.transfer("loan").aborted
    assert p.scheduler.num_open == 1, "the worker waits for it"
    p.transfer("loan").end(STATS)
    p.round()
    assert p.scheduler.num_open == 0


def test_a_worker_that_stops_lets_its_loans_go():
    p = Prefill(chunk_budget_tokens=64)
    p.round(prefill(make_spec("a", PROMPT)))
    p.transfer("a").end(STATS)
    assert lend(p, "loan", PROMPT) == 4
    p.scheduler.stop(LOST, p.now)
    assert p.transfer("loan").aborted
    assert p.scheduler.num_open == 1
    p.transfer("loan").end(LOST)
    p.round()
    assert p.scheduler.num_open == 0


def test_a_pull_pays_where_moving_is_clearly_cheaper_than_computing():
    cost = TransferCost(latency_s=0.01, bytes_per_s=1e9)
    assert is_worth_moving(1000, 100_000, prefill_token_s=1e-3, cost=cost)
    assert not is_worth_moving(1000, 100_000, prefill_token_s=1e-4, cost=cost), "twice the time must be saved"
    assert not is_worth_moving(10, 100_000, prefill_token_s=1e-3, cost=cost), "latency eats a short one"
    assert not is_worth_moving(0, 100_000, prefill_token_s=1.0, cost=cost)


def test_costs_follow_what_is_seen():
    costs = CostEstimator()
    assert not costs.is_worth_pulling(10_000, 100_000), "nothing is known of computing yet"
    costs.note_step(4, 1.0)
    assert costs.prefill_token_s is None, "a small step says little"
    costs.note_step(1000, 1.0)
    assert costs.prefill_token_s == pytest.approx(1e-3)
    assert costs.patience_s(500) == pytest.approx(0.5)
    assert costs.is_worth_pulling(1000, 100_000)
    for _ in range(50):
        costs.note_pull(100_000_000, 5.0)
    assert costs.cost.bytes_per_s == pytest.approx(2e7, rel=0.05)
    assert not costs.is_worth_pulling(1000, 100_000), "this network is slower than thought"
