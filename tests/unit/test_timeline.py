"""Timelines: phases where they were, by one clock; entries bounded in number and size."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BatonError, ErrorKind
from common.rpc.worker_messages import Timings
from common.sampling_params import SamplingParams
from common.tracing import TraceContext
from router.request_record import MAX_MESSAGE_CHARS, Attempt, Failure, LegEnd, RequestRecord
from router.spec import Usage
from router.timeline import Timeline, phases_of, timeline_entry

LOST = Failure(ErrorKind.LEASE_LOST, "worker d0 is not connected")


def make_attempt(base: float = 10.0, **fields: Any) -> Attempt:
    """Placed at +1, reserved at +2, first token at +5, transfer ended at +7."""
    values = {
        "first_index": 0,
        "placing_at": base,
        "placed_at": base + 1,
        "sent_at": base + 2,
        "first_token_at": base + 5,
        "prefill_id": "p0",
        "decode_id": "d0",
        "transfer_id": "t-0",
        "computed": LegEnd(base + 7, Timings(queue_s=0.5, prefill_s=2.0, transfer_s=3.0, transfer_bytes=4096)),
        "decoded": LegEnd(base + 20, Timings(decode_s=12.0)),
        **fields,
    }
    return Attempt(**values)


def make_record(*attempts: Attempt, **fields: Any) -> RequestRecord:
    values = {
        "request_id": "r",
        "trace": None,
        "operation": "chat",
        "sampling": SamplingParams(max_tokens=9),
        "outcome": "stop",
        "phase": "decoding",
        "failure": None,
        "usage": Usage(20, 5, 16),
        "prefilled": True,
        "received_at": 8.0,
        "submitted_at": 9.0,
        "ended_at": 31.0,
        "queue_s": 4.5,
        "timings": Timings(),
        "attempts": list(attempts) or [make_attempt()],
        **fields,
    }
    return RequestRecord(**values)


def shown(record: RequestRecord) -> list[tuple[str, float, float | None, str]]:
    """(name, start since receipt, duration, worker) of each phase."""
    return [
        (p.name, p.start - record.received_at, None if p.end is None else p.end - p.start, p.worker_id)
        for p in phases_of(record)
    ]


def test_worker_phases_have_the_workers_durations_and_stand_by_the_routers_stamps():
    assert shown(make_record()) == [
        ("admit", 0.0, 1.0, ""),
        ("queue", 1.0, 1.0, ""),
        ("place", 2.0, 1.0, ""),
        ("reserve", 3.0, 1.0, "d0"),
        ("queue", 4.5, 0.5, "p0"),
        ("prefill", 5.0, 2.0, "p0"),
        ("transfer", 6.0, 3.0, "p0"),
        ("decode", 10.0, 12.0, "d0"),
    ]


def test_where_a_worker_never_said_the_routers_stamps_stand_in():
    """A stop string ended it, or the worker died."""
    attempt = make_attempt(computed=None, decoded=None)
    assert shown(make_record(attempt))[4:] == [("prefill", 4.0, 3.0, "p0"), ("decode", 7.0, 16.0, "d0")]


def test_a_decode_worker_alone_has_neither_reservation_nor_transfer():
    attempt = make_attempt(prefill_id="", sent_at=11.0)
    assert [(name, worker) for name, *_, worker in shown(make_record(attempt))[2:]] == [
        ("place", ""), ("queue", "d0"), ("prefill", "d0"), ("decode", "d0"),
    ]  # fmt: skip


def test_a_first_token_that_is_the_last_decodes_nothing():
    record = make_record(usage=Usage(20, 1, 0))
    assert "decode" not in [name for name, *_ in shown(record)]


def test_a_retry_is_a_migration_until_tokens_flow_again():
    failed = make_attempt(decoded=None, failed_at=20.0, failure=LOST, blamed_ids=("d0",))
    second = make_attempt(21.0, decode_id="d1", first_index=3, decoded=None)
    record = make_record(failed, second, usage=Usage(20, 6, 0))
    assert [p for p in shown(record) if p[0] in ("migrate", "decode")] == [
        ("decode", 7.0, 5.0, "d0"), ("migrate", 12.0, 6.0, ""), ("decode", 18.0, 5.0, "d1"),
    ]  # fmt: skip
    assert [p.attempt for p in phases_of(record) if p.name == "place"] == [1, 2]


def test_of_a_running_request_only_the_present_phase_is_open():
    whole = make_attempt()
    stages: list[dict[str, Any]] = [
        {"placing_at": None}, {"placed_at": None}, {"sent_at": None}, {"first_token_at": None}, {"decoded": None},
    ]  # fmt: skip
    for stage, open_phase in zip(stages, ["queue", "place", "reserve", "prefill", "decode"], strict=True):
        later = list(stages[stages.index(stage) :])
        attempt = replace(whole, **{k: v for s in later for k, v in s.items()}, computed=None)
        record = make_record(attempt, outcome="running")
        assert [name for name, _, duration, _ in shown(record) if duration is None] == [open_phase]


stamps = st.lists(st.floats(0, 100), min_size=5, max_size=5).map(sorted)


@given(st.lists(stamps, min_size=1, max_size=3), st.integers(0, 5), st.integers(0, 9), st.booleans(), st.data())
def test_whatever_is_known_no_phase_ends_before_it_starts_or_begins_before_the_request(
    all_stamps, known, tokens, running, data
):
    seconds = st.floats(0, 1000)
    attempts = []
    for number, values in enumerate(all_stamps):
        base = number * 100.0
        names = ["placing_at", "placed_at", "sent_at", "first_token_at", "failed_at"]
        last = number == len(all_stamps) - 1
        some = dict(zip(names, [base + v for v in values], strict=True))
        if last:
            some = {name: some[name] for name in names[: min(known, 4)]}
        timings = Timings(*data.draw(st.tuples(seconds, seconds, seconds, st.just(8), seconds)))
        ends = {"computed": LegEnd(base + 100, timings), "decoded": LegEnd(base + 100, timings)}
        ids = {"prefill_id": data.draw(st.sampled_from(["", "p"])), "decode_id": "d"}
        attempts.append(Attempt(0, **some, **ids, **(ends if data.draw(st.booleans()) else {})))
    record = make_record(
        *attempts,
        received_at=-2.0,
        submitted_at=-1.0,
        ended_at=len(attempts) * 100.0,
        usage=Usage(1, tokens, 0),
        outcome="running" if running else "stop",
    )
    phases = phases_of(record)
    assert [p.start for p in phases] == sorted(p.start for p in phases)
    for phase in phases:
        assert phase.start >= record.received_at
        assert (phase.end is None and running) or phase.start <= phase.end <= record.ended_at
    entry = timeline_entry(record, 0.0)
    assert len(entry["attempts"]) == len(attempts)


def test_the_json_says_where_who_how_much_and_how_it_ended():
    failed = make_attempt(decoded=None, failed_at=20.0, failure=LOST, blamed_ids=("d0",))
    failure = Failure(ErrorKind.NO_WORKER, "workers failed 2 attempts")
    record = make_record(
        failed,
        make_attempt(21.0, first_token_at=None, computed=None, decoded=None),
        trace=TraceContext("a" * 32, "b" * 16, "", sampled=True),
        outcome="no_worker",
        failure=failure,
    )
    entry = timeline_entry(record, 1_000_000.0)
    phases = entry.pop("phases")
    assert entry == {
        "request_id": "r",
        "trace_id": "a" * 32,
        "operation": "chat",
        "state": "failed",
        "outcome": "no_worker",
        "error": {"kind": "no_worker", "message": "workers failed 2 attempts"},
        "received_at": 1_000_008.0,
        "elapsed_ms": 23_000.0,
        "first_token_ms": 7000.0,
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "output_tokens": 5,
        "transfer_bytes": 4096,
        "retries": 1,
        "attempts": [
            {
                "transfer_id": "t-0",
                "prefill_worker": "p0",
                "decode_worker": "d0",
                "error": {"kind": "lease_lost", "message": "worker d0 is not connected"},
                "blamed_workers": ["d0"],
            },
            {
                "transfer_id": "t-0",
                "prefill_worker": "p0",
                "decode_worker": "d0",
                "error": None,
                "blamed_workers": [],
            },
        ],
    }
    assert [(p["phase"], p["attempt"], p["error"]) for p in phases if p["error"]] == [
        ("decode", 1, "lease_lost"), ("migrate", 2, "no_worker"), ("prefill", 2, "no_worker"),
    ]  # fmt: skip
    assert phases[3] == {
        "phase": "reserve", "attempt": 1, "worker_id": "d0", "start_ms": 3000.0, "duration_ms": 1000.0,
        "error": None,
    }  # fmt: skip


@given(st.integers(0, 4), st.lists(st.sampled_from("abc"), max_size=30))
def test_the_newest_are_kept_and_never_more_than_asked_for(capacity, ids):
    timeline = Timeline(capacity)
    records = [make_record(request_id=request_id, ended_at=float(i)) for i, request_id in enumerate(ids)]
    for record in records:
        timeline.on_end(record)
    newest = records[len(records) - min(capacity, len(records)) :]
    assert len(timeline) == len(newest)
    for request_id in "abc":
        assert timeline.find(request_id) == [r for r in newest if r.request_id == request_id]
    assert set(timeline._by_id) == {r.request_id for r in newest}, "an id outlives its entries"


def test_an_id_that_everybody_uses_does_not_make_an_endless_answer():
    timeline = Timeline(1000)
    for _ in range(1000):
        timeline.on_end(make_record())
    assert len(timeline.find("r")) == 128


def test_the_largest_entry_stays_below_what_is_promised():
    """Three attempts, ids as long as they may be, endless complaints."""
    failures = [Failure.of(BatonError(ErrorKind.LEASE_LOST, x * 10_000)) for x in "abcd"]
    assert len(failures[0].message) == MAX_MESSAGE_CHARS
    ids = {"prefill_id": "p" * 64, "decode_id": "d" * 64, "transfer_id": "t" * 30, "blamed_ids": ("p" * 64, "d" * 64)}
    attempts = [make_attempt(float(i), failed_at=i + 9.0, failure=failures[i], **ids) for i in range(3)]
    trace = TraceContext("a" * 32, "b" * 16, "c" * 16, sampled=True)
    largest = make_record(*attempts, request_id="r" * 128, trace=trace, failure=failures[3], outcome="lease_lost")
    assert deep_size(largest) < 7 << 10
    assert deep_size(make_record()) < 2 << 10


def deep_size(thing: Any, seen: set[int] | None = None) -> int:
    """Bytes of an object and all that it refers to; the enums and strings of the code itself not counted."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, ErrorKind):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if is_dataclass(thing):
        return size + sum(deep_size(getattr(thing, f.name), seen) for f in fields(thing))
    if isinstance(thing, list | tuple):
        return size + sum(deep_size(item, seen) for item in thing)
    return size


@pytest.mark.parametrize("outcome", ["abort", "stop"])
def test_the_final_state_is_named(outcome):
    failure = Failure(ErrorKind.CANCELLED, "the request was cancelled") if outcome == "abort" else None
    entry = timeline_entry(make_record(outcome=outcome, failure=failure), 0.0)
    assert entry["state"] == {"abort": "aborted", "stop": "finished"}[outcome]
