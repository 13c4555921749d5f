"""The audit of the prefix index: honest error is borne, lasting error is asked about once, the gone are forgotten."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from common.registry import reread_key
from router.cluster.index_audit import IndexAudit
from router.placement_feedback import PlacementFeedback
from router.policy.index_error import MIN_PLACEMENTS, IndexErrors
from router.policy.transfer_rate import TransferRate
from tests.fakes.router_parts import Bench, make_record, make_spec, settle


def test_an_index_that_mostly_tells_the_truth_is_left_alone():
    errors = IndexErrors()
    for i in range(500):
        assert not errors.note("p0", 1000, 1000 if i % 5 else 0)
    assert 0.1 < errors.ratio("p0") < 0.3


def test_lasting_error_in_either_direction_is_told_once_and_then_counted_anew():
    for foretold, found in ((1000, 100), (100, 1000)):
        errors = IndexErrors()
        told = [errors.note("p0", foretold, found) for _ in range(MIN_PLACEMENTS * 2)]
        assert [i for i, due in enumerate(told) if due] == [MIN_PLACEMENTS - 1, 2 * MIN_PLACEMENTS - 1]


def test_prompts_without_any_cached_prefix_are_no_error():
    errors = IndexErrors()
    assert not any(errors.note("p0", 0, 0) for _ in range(100))
    assert errors.ratio("p0") == errors.ratio("never heard of") == 0


def test_workers_that_are_gone_are_forgotten():
    errors = IndexErrors()
    errors.note("p0", 100, 0)
    errors.keep(["p1"])
    assert errors.ratio("p0") == 0


class Asked:
    """A Redis that remembers what was set."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def set(self, key, value, px) -> None:
        self.keys.append(key)


class FleetOf:
    def __init__(self, *records) -> None:
        self._sessions = {r.worker_id: SimpleNamespace(record=r) for r in records}

    def session(self, worker_id):
        return self._sessions.get(worker_id)

    def sessions(self):
        return list(self._sessions.values())


async def test_a_worker_about_which_the_index_is_wrong_is_asked_to_write_it_anew():
    redis = Asked()
    audit = IndexAudit(redis, "c", FleetOf(make_record("p0", "prefill"), make_record("p1", "prefill")))
    task = asyncio.create_task(audit.run())
    for _ in range(MIN_PLACEMENTS):
        audit.note("p0", 1000, 0)
        audit.note("p1", 1000, 1000)
        audit.note("gone", 1000, 0)
    await settle()
    assert redis.keys == [reread_key("c", "p0", "e1")]
    assert audit.num_rereads == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_ended_request_tells_what_its_worker_found_and_how_fast_its_kv_travelled():
    notes = []
    transfers = TransferRate()
    feedback = PlacementFeedback(transfers, SimpleNamespace(note=lambda *what: notes.append(what)))
    bench = Bench()
    bench.dispatcher._observer.on_end = feedback.on_end
    run = bench.dispatcher.submit(make_spec(max_tokens=1), lambda: None)
    await settle()
    run._facts.attempt.predicted_cached_tokens = 16
    bench.decodes[0].reserved("t-0")
    fields = {"prefill_s": 0.1, "transfer_s": 0.5, "transfer_bytes": 1 << 20}
    bench.prefills[0].output(
        "t-0", token_ids=[5], finish_reason="LENGTH", num_cached_tokens=0, timings=fields, leg_ended=True
    )
    await settle()
    assert notes == [("p0", 16, 0)]
    assert transfers.token_transfer_s > 0
