"""What workers say of ended legs: spans from the stamps that the engine kept, a line for each leg that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog

from common.engine.messages import AbortCommand, Command, EndedLeg
from common.engine.sequence import MAX_CHUNKS_TOLD
from common.errors import BatonError, ErrorKind
from common.registry import Role
from common.rpc.worker_messages import SequenceSpec
from common.tracing import Span, TraceContext
from common.worker.leg_reports import LegReporter, leg_spans
from kv_transfer.types import Handoff, TransferStats
from tests.unit.engine_fakes import STATS, make_spec, next_token, prefill, reserve
from tests.unit.test_decode_scheduler import Decode
from tests.unit.test_prefill_scheduler import Prefill

ROOT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "", sampled=True)
PROMPT = list(range(1, 23))
LOST = BatonError(ErrorKind.LEASE_LOST, "the peer is gone")


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, spans) -> None:
        self.spans += spans

    def close(self, timeout_s: float) -> None: ...


def traced(transfer_id: str = "t", prompt: list[int] = PROMPT, **fields) -> SequenceSpec:
    return replace(make_spec(transfer_id, prompt, **fields), traceparent=ROOT.traceparent)


def ended(engine: Prefill | Decode, *commands: Command) -> EndedLeg:
    """The one leg that this round ended."""
    engine.round(*commands)
    assert engine.news is not None
    (leg,) = engine.news.ended_legs
    return leg


def shown(leg: EndedLeg, role: Role) -> list[tuple[str, float, float]]:
    spans = leg_spans(leg, role, "w0")
    for span in spans:
        assert (span.context.trace_id, span.context.parent_id) == (ROOT.trace_id, ROOT.span_id)
        assert span.attributes["baton.worker_id"] == "w0"
        assert span.attributes["baton.transfer_id"] == "t"
        assert span.attributes["baton.request_id"] == "r-t"
    return [(span.name, span.start, span.end) for span in spans]


def stats_at(ended_at: float) -> TransferStats:
    return TransferStats(0.5, 1000, ended_at)


def test_a_prefill_leg_is_queue_prefill_with_its_chunks_and_transfer():
    p = Prefill(chunk_budget_tokens=16)
    p.round(prefill(traced()))
    p.round()
    p.transfer("t").end(stats_at(2.75))
    leg = ended(p)
    assert shown(leg, "prefill") == [("queue", 1.0, 1.0), ("prefill", 1.0, 2.0), ("transfer", 2.25, 2.75)]
    _, work, transfer = leg_spans(leg, "prefill", "w0")
    assert [(e.at, e.attributes["baton.num_computed_tokens"]) for e in work.events] == [(1.0, 16), (2.0, 22)]
    assert (transfer.attributes["baton.transfer_side"], transfer.attributes["baton.transfer_bytes"]) == ("sender", 1000)
    assert all(span.error is None for span in leg_spans(leg, "prefill", "w0"))


def test_a_decode_leg_is_queue_transfer_and_decode():
    d = Decode()
    d.round(reserve(traced(max_tokens=3)))
    d.receiver.land("t", PROMPT)
    d.receiver.open.pop("t").callbacks.on_commit(Handoff(22, next_token(PROMPT), None), stats_at(1.5))
    d.round()
    leg = ended(d)
    assert shown(leg, "decode") == [("queue", 1.0, 1.0), ("transfer", 1.0, 1.5), ("decode", 2.0, 3.0)]
    assert leg_spans(leg, "decode", "w0")[1].attributes["baton.transfer_side"] == "receiver"


def test_a_decode_worker_that_computes_the_prompt_has_a_prefill_of_its_own():
    d = Decode(chunk_budget_tokens=16)
    d.round(reserve(traced(max_tokens=2), prefill_here=True))
    d.round()
    leg = ended(d)
    assert shown(leg, "decode") == [("queue", 1.0, 1.0), ("prefill", 1.0, 2.0), ("decode", 2.0, 3.0)]
    assert [e.at for e in leg_spans(leg, "decode", "w0")[1].events] == [1.0, 2.0]


@pytest.mark.parametrize(("stage", "names"), [(0, ["queue"]), (1, ["queue", "prefill"]), (2, ["queue", "prefill"])])
def test_an_aborted_prefill_leg_closes_the_span_that_it_was_in(stage, names):
    p = Prefill(chunk_budget_tokens=16, max_running=1)
    if stage == 0:
        p.round(prefill(make_spec("other", PROMPT)))
    p.round(prefill(traced()))
    if stage == 2:
        p.round()
    abort = AbortCommand(1, "t")
    if stage:
        p.round(abort)
        p.transfer("t").end(BatonError(ErrorKind.CANCELLED, "given up"))
        leg = ended(p)
        names = [*names, "transfer"]
    else:
        leg = ended(p, abort)
    assert [name for name, *_ in shown(leg, "prefill")] == names
    last = leg_spans(leg, "prefill", "w0")[-1]
    assert (last.end, last.attributes["baton.outcome"], last.error) == (p.now, "abort", None)


def test_a_failure_is_the_error_of_the_last_span_and_no_other():
    d = Decode()
    d.round(reserve(traced()))
    d.receiver.fail("t", LOST)
    leg = ended(d)
    assert [name for name, *_ in shown(leg, "decode")] == ["queue", "transfer"]
    queue, transfer = leg_spans(leg, "decode", "w0")
    assert (queue.error, transfer.error) == (None, "the peer is gone")
    assert transfer.attributes["error.type"] == "lease_lost"
    assert transfer.attributes["baton.phase"] == "receiving"


def test_legs_that_nobody_traces_and_that_end_well_are_not_even_told():
    p = Prefill()
    p.round(prefill(make_spec("t", PROMPT[:6])))
    p.transfer("t").end(STATS)
    p.round()
    assert p.leg("t").ended
    assert p.news is not None
    assert p.news.ended_legs == ()


def test_chunks_are_told_only_where_somebody_traces_and_only_so_many():
    long = [1 + i % 40 for i in range(MAX_CHUNKS_TOLD + 50)]
    p = Prefill(num_blocks=64, chunk_budget_tokens=1, max_model_len=256)
    p.round(prefill(traced(prompt=long)), prefill(make_spec("other", long)))
    for _ in long:
        p.round()
    assert len(p.scheduler._sequences["t"].chunks) == MAX_CHUNKS_TOLD
    assert p.scheduler._sequences["other"].chunks == []


def test_what_is_not_sampled_is_logged_and_not_exported():
    sink, d = Sink(), Decode()
    d.round(reserve(replace(traced(), traceparent=replace(ROOT, sampled=False).traceparent)))
    d.receiver.fail("t", LOST)
    with structlog.testing.capture_logs() as lines:
        LegReporter("decode", "d0", sink).on_ended([ended(d)])
    assert sink.spans == []
    assert lines[0]["trace_id"] == ROOT.trace_id


@pytest.mark.parametrize("sink", [None, Sink()])
def test_a_failed_leg_is_one_line_with_all_ids(sink):
    d = Decode()
    d.round(reserve(traced()))
    d.receiver.fail("t", LOST)
    leg = ended(d)
    with structlog.testing.capture_logs() as lines:
        LegReporter("decode", "d0", sink).on_ended([leg])
    assert lines == [
        {
            "event": "leg failed",
            "log_level": "warning",
            "request_id": "r-t",
            "transfer_id": "t",
            "trace_id": ROOT.trace_id,
            "kind": "lease_lost",
            "message": "the peer is gone",
            "phase": "receiving",
            "tokens": 22,
            "output_tokens": 0,
            "elapsed_s": 1.0,
        }
    ]
    assert sink is None or len(sink.spans) == 2


def test_a_refused_command_is_a_line_too_without_trace_id_where_there_is_none():
    d = Decode(max_waiting=1)
    spec = make_spec("t", PROMPT, max_tokens=500)
    leg = ended(d, reserve(replace(spec, token_ids=[99])))
    with structlog.testing.capture_logs() as lines:
        LegReporter("decode", "d0", None).on_ended([leg])
    (line,) = lines
    assert (line["log_level"], line["kind"], line["phase"]) == ("info", "invalid_request", "refused")
    assert "trace_id" not in line
