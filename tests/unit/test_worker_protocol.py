"""What a router says, a worker hears, and the other way round: both ends' conversions, joined by the wire's bytes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.worker.v1 import worker_pb2
from common.engine import messages as worker
from common.errors import BatonError, ErrorKind
from common.rpc.worker_convert import load_from_proto, load_to_proto, target_from_proto
from common.rpc.worker_messages import LoadReport, SequenceSpec, Timings, TransferTarget, WorkerIdentity
from common.sampling_params import FinishReason, SamplingParams
from common.step_rates import StepRates
from common.worker import convert as worker_convert
from router.cluster import convert as router_convert

NOW, OWNER = 1000.0, 3
U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
FLOAT32 = st.floats(0, 1, width=32)
NAME, SECRET = st.text(max_size=12), st.binary(max_size=16)
IDS = st.lists(U32, max_size=5)
SAMPLING = st.builds(SamplingParams, U32, FLOAT32, U32, FLOAT32, FLOAT32, U64, IDS.map(tuple))
SPEC = st.builds(
    SequenceSpec,
    transfer_id=NAME,
    request_id=NAME,
    token_ids=IDS,
    num_prompt_tokens=U32,
    hash_seed=SECRET,
    sampling=SAMPLING,
    deadline=st.integers(1, 60_000).map(lambda ms: NOW + ms / 1e3),
)
TARGET = st.builds(TransferTarget, NAME, st.builds(WorkerIdentity, NAME, NAME), SECRET, U32)


def figures(kind: type) -> st.SearchStrategy:
    """A dataclass of numbers, whichever it has."""
    seconds = st.floats(0, 1e6)
    rates = st.none() | st.builds(StepRates, seconds, seconds, seconds)
    values = {"int": U32, "float": seconds, "bool": st.booleans(), "StepRates | None": rates}
    return st.builds(kind, **{field.name: values[str(field.type)] for field in fields(kind)})


ENDED = st.builds(
    worker.LegOutput,
    transfer_id=NAME,
    first_index=U32,
    token_ids=IDS.map(tuple),
    finish_reason=st.sampled_from(FinishReason),
    num_cached_tokens=U32,
    timings=figures(Timings),
    leg_ended=st.just(True),
)


def heard(frame: worker_pb2.SessionRequest) -> worker.Command | None:
    wire = worker_pb2.SessionRequest.FromString(frame.SerializeToString())
    return worker_convert.command_from_proto(wire, OWNER, NOW, max_timeout_s=60.0)


def told(news: worker.OwnerNews, load: LoadReport | None = None) -> list[worker_pb2.SessionResponse]:
    frames = worker_convert.news_frames(news, load_to_proto(load or LoadReport()))
    return [worker_pb2.SessionResponse.FromString(frame.SerializeToString()) for frame in frames]


@given(SPEC, st.booleans())
def test_a_reservation_is_heard_as_it_was_asked_for(spec: SequenceSpec, prefill_here: bool) -> None:
    command = heard(router_convert.reserve_frame(spec, NOW, prefill_here=prefill_here))
    assert isinstance(command, worker.ReserveCommand)
    assert (command.owner, command.prefill_here) == (OWNER, prefill_here)
    assert replace(command.spec, deadline=spec.deadline) == spec
    assert command.spec.deadline == pytest.approx(spec.deadline, abs=2e-3)


@given(SPEC, TARGET)
def test_a_target_reaches_the_prefill_worker_as_the_decode_worker_gave_it(
    spec: SequenceSpec, target: TransferTarget
) -> None:
    reserved, _ = told(worker.OwnerNews([worker.Reservation(spec.transfer_id, target)]))
    passed_on = target_from_proto(reserved.reserved.target)
    assert (reserved.reserved.transfer_id, passed_on) == (spec.transfer_id, target)
    command = heard(router_convert.prefill_frame(spec, passed_on, NOW))
    assert isinstance(command, worker.PrefillCommand)
    assert command.target == target
    assert command.spec.transfer_id == spec.transfer_id


@given(NAME)
def test_an_abort_names_its_transfer(transfer_id: str) -> None:
    assert heard(router_convert.abort_frame(transfer_id)) == worker.AbortCommand(OWNER, transfer_id)


@given(ENDED)
def test_a_legs_last_frame_tells_everything(output: worker.LegOutput) -> None:
    (step,) = told(worker.OwnerNews(outputs=[output]))
    (wire,) = step.step.outputs
    assert router_convert.has_news(wire)
    news = router_convert.news_from_proto(wire)
    assert (news.finish_reason, news.leg_ended, news.error) == (output.finish_reason, True, None)
    assert news.num_cached_tokens == output.num_cached_tokens
    assert news.timings == replace(output.timings, overlap_s=0.0)
    last = output.first_index + len(output.token_ids) if output.token_ids else None
    assert news.num_output_tokens == last
    assert (wire.first_index, tuple(wire.token_ids)) == (output.first_index, output.token_ids)


def test_a_first_token_that_ends_the_request_brings_its_cached_tokens() -> None:
    """The router ends the request with this frame: the leg's last one would come too late for usage."""
    output = worker.LegOutput("t", 0, (5,), FinishReason.LENGTH, num_cached_tokens=48)
    (step,) = told(worker.OwnerNews(outputs=[output]))
    news = router_convert.news_from_proto(step.step.outputs[0])
    assert (news.leg_ended, news.num_output_tokens, news.num_cached_tokens) == (False, 1, 48)


def test_a_token_and_nothing_else_is_no_news() -> None:
    (step,) = told(worker.OwnerNews(outputs=[worker.LegOutput("t", 4, (5,))]))
    assert not router_convert.has_news(step.step.outputs[0])


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_of_error_is_heard_as_itself(kind: ErrorKind) -> None:
    error = BatonError(kind, "what, where", param="x", retry_after_s=1.5)
    (step,) = told(worker.OwnerNews(outputs=[worker.LegOutput("t", error=error, leg_ended=True)]))
    back = router_convert.news_from_proto(step.step.outputs[0]).error
    assert back is not None
    assert (back.kind, back.message, back.param, back.retry_after_s) == (kind, "what, where", "x", 1.5)


@given(figures(LoadReport))
def test_the_routers_load_report_is_the_workers(load: LoadReport) -> None:
    (step,) = told(worker.OwnerNews(), load)
    back = load_from_proto(step.step.load)
    told_fields = worker_pb2.LoadReport.DESCRIPTOR.fields_by_name.keys()
    assert back == LoadReport(**{name: getattr(load, name) for name in told_fields})
