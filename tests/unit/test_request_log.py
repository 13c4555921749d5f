"""Each request that ends badly is one line at the router, which explains itself; no line holds what a user wrote."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import structlog

from common.errors import BatonError, ErrorKind
from common.telemetry import configure_logging
from common.tracing import TraceContext
from router import request as request_module
from router.metrics import RouterMetrics
from router.observers import Observers
from router.request_record import Failure, Refusal
from router.timeline import Timeline
from tests.fakes.router_parts import PROMPT, Bench, make_spec, settle, until
from tests.logging_state import logging_restored

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "", sampled=True)
BAD_ENDS = ("request failed", "request aborted", "request refused")


@pytest.fixture
def bench(monkeypatch) -> Bench:
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench = Bench(num_prefill=2, num_decode=2)
    bench.dispatcher._observer = Observers(RouterMetrics(), Timeline(8), None)
    return bench


@pytest.fixture
def lines() -> Iterator[list]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def bad_ends(lines: list) -> list[dict]:
    return [line for line in lines if line["event"] in BAD_ENDS]


async def started(bench: Bench, **fields):
    spec = replace(make_spec(), **{"request_id": "req-1", "trace": TRACE, **fields})
    run = bench.dispatcher.submit(spec, lambda: None)
    await settle()
    return run


def transfer_id_of(bench: Bench, worker: int) -> str:
    return bench.decodes[worker].commands[-1].reserve.spec.transfer_id


async def test_a_request_that_no_worker_could_finish_says_what_became_of_each_attempt(bench, lines):
    run = await started(bench)
    first = transfer_id_of(bench, 0)
    bench.decodes[0].reserved(first)
    bench.prefills[0].output(first, first_index=0, token_ids=[50])
    bench.decodes[0].lose()
    await until(lambda: bench.decodes[1].commands_of("reserve"))
    bench.decodes[1].output(transfer_id_of(bench, 1), error="OVERLOADED")
    await settle()
    assert run.state == "failed"
    again, failed = [line for line in lines if line["log_level"] != "debug"]
    assert again["event"] == "request is tried again"
    assert (again["request_id"], again["trace_id"], again["transfer_id"]) == ("req-1", TRACE.trace_id, first)
    assert (again["kind"], again["workers"], again["phase"], again["tokens"]) == ("lease_lost", ["d0"], "decoding", 1)
    assert failed.pop("elapsed_s") >= 0
    assert failed == {
        "event": "request failed",
        "log_level": "info",
        "request_id": "req-1",
        "trace_id": TRACE.trace_id,
        "kind": "overloaded",
        "message": "played",
        "phase": "reserving",
        "attempts": 2,
        "workers": ["p0", "d0", "d1"],
        "transfer_ids": [first, transfer_id_of(bench, 1)],
        "causes": ["lease_lost (d0): worker d0 is not connected", "overloaded (d1): played"],
        "prompt_tokens": 20,
        "tokens": 1,
    }


async def test_our_faults_are_warnings_bugs_are_errors_and_a_client_that_left_is_information(bench, lines):
    async def broken(*_, **__):
        raise RuntimeError("a bug")

    for end in ("leave", "drain", "break"):
        if end == "break":
            bench.placer.place = broken
        run = await started(bench)
        if end == "leave":
            run.abort()
        elif end == "drain":
            run.fail(BatonError(ErrorKind.DRAINING, "the router is shutting down"))
    told = [(line["event"], line["log_level"], line["kind"]) for line in bad_ends(lines)]
    assert told == [
        ("request aborted", "info", "cancelled"),
        ("request failed", "warning", "draining"),
        ("request failed", "error", "internal_error"),
    ]


async def test_a_good_end_is_told_at_debug_only(bench, lines):
    await started(bench)
    transfer_id = transfer_id_of(bench, 0)
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50])
    bench.prefills[0].output(transfer_id, leg_ended=True)
    bench.decodes[0].output(transfer_id, first_index=1, token_ids=[51, 52, 53], finish_reason="LENGTH", leg_ended=True)
    (line,) = lines
    assert (line["event"], line["log_level"], line["outcome"], line["tokens"]) == (
        "request finished", "debug", "length", 4,
    )  # fmt: skip


async def test_without_a_trace_there_is_no_trace_id(bench, lines):
    run = await started(bench, trace=None)
    run.abort()
    (line,) = bad_ends(lines)
    assert "trace_id" not in line


@pytest.fixture
def restored_logging() -> Iterator[None]:
    with logging_restored():
        yield


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_both_formats_have_the_line_in_one_piece_and_neither_has_the_prompt(bench, restored_logging, log_format):
    out = io.StringIO()
    configure_logging("debug", log_format, "router", stream=out)
    run = await started(bench, prompt_token_ids=[424242] * 20, stop=("my secret stop",))
    run.fail(BatonError(ErrorKind.DEADLINE_EXCEEDED, "too\nslow"))
    failure = Failure(ErrorKind.INVALID_REQUEST, "`max_tokens` must be at least 1")
    bench.dispatcher._observer.on_refused(Refusal("req-2", None, "chat", failure, 1.0, 2.5))
    failed, refused = [line for line in out.getvalue().splitlines() if "request" in line]
    for line, texts in (
        (failed, ("request failed", "req-1", TRACE.trace_id, "deadline_exceeded", "too\\nslow", "reserving", "d0")),
        (refused, ("request refused", "req-2", "invalid_request", "must be at least 1", "1.5")),
    ):
        assert all(text in line for text in texts), line
        assert "424242" not in line
        assert "secret" not in line
        if log_format == "json":
            assert json.loads(line)["elapsed_s"] >= 0
    assert len(PROMPT) == 20


async def test_an_observer_that_fails_harms_neither_the_request_nor_the_others(bench, lines, monkeypatch):
    def broken(*_) -> None:
        raise RuntimeError("no")

    observers = bench.dispatcher._observer
    monkeypatch.setattr(observers._at_end[1], "on_end", broken)
    ended = []
    run = bench.dispatcher.submit(make_spec(), lambda: ended.append(run.take().end))
    await settle()
    run.abort()
    assert len(ended) == 1
    assert [line["event"] for line in lines] == ["an observer failed", "request aborted"]
