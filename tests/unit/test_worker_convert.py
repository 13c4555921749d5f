"""Nothing is lost or invented between the worker protocol and the engine's messages."""

from __future__ import annotations

import pytest

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2
from common.engine.messages import AbortCommand, LegOutput, OwnerNews, PrefillCommand, Reservation, ReserveCommand
from common.errors import BatonError, ErrorKind
from common.rpc.worker_convert import load_to_proto
from common.rpc.worker_messages import LoadReport, SequenceSpec, Timings
from common.sampling_params import FinishReason, SamplingParams
from common.worker.convert import command_from_proto, news_frames
from kv_transfer.types import TransferTarget, WorkerIdentity

SPEC = worker_pb2.SequenceSpec(
    transfer_id="t",
    request_id="r",
    token_ids=[1, 2, 3],
    num_prompt_tokens=2,
    hash_seed=b"h" * 16,
    sampling=worker_pb2.SamplingParams(
        temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, seed=2**64 - 1, max_tokens=9, stop_token_ids=[7, 8]
    ),
    timeout_ms=1500,
    traceparent="00-trace-span-01",
)
TARGET = worker_pb2.TransferTarget(address="h:1", worker_id="d", epoch="e", secret=b"s" * 16, num_cached_tokens=16)


def spec(deadline: float) -> SequenceSpec:
    sampling = SamplingParams(9, 0.5, 4, 0.25, 0.125, 2**64 - 1, (7, 8))
    return SequenceSpec("t", "r", [1, 2, 3], 2, b"h" * 16, sampling, deadline, "00-trace-span-01")


def convert(**frame: object) -> object:
    return command_from_proto(worker_pb2.SessionRequest(**frame), 4, now=100.0, max_timeout_s=60.0)  # type: ignore[arg-type]


def test_commands_keep_every_field_and_their_owner():
    reserve = worker_pb2.ReserveCommand(spec=SPEC, prefill_here=True)
    assert convert(reserve=reserve) == ReserveCommand(4, spec(101.5), True)
    target = TransferTarget("h:1", WorkerIdentity("d", "e"), b"s" * 16, 16)
    prefill = worker_pb2.PrefillCommand(spec=SPEC, target=TARGET)
    assert convert(prefill=prefill) == PrefillCommand(4, spec(101.5), target)
    assert convert(abort=worker_pb2.AbortCommand(transfer_id="t")) == AbortCommand(4, "t")


def test_a_deadline_is_never_further_away_than_the_worker_allows():
    patient = worker_pb2.SequenceSpec()
    patient.CopyFrom(SPEC)
    patient.timeout_ms = 3_600_000
    command = convert(reserve=worker_pb2.ReserveCommand(spec=patient))
    assert isinstance(command, ReserveCommand)
    assert command.spec.deadline == 160.0


def test_a_frame_without_a_command_is_none():
    assert convert() is None
    assert convert(hello=worker_pb2.Hello()) is None


def test_news_are_reservations_then_one_step_with_everything():
    target = TransferTarget("h:1", WorkerIdentity("d", "e"), b"s" * 16, 16)
    error = BatonError(ErrorKind.OVERLOADED, "full", param="p", retry_after_s=1.5)
    outputs = [
        LegOutput("a", 3, (5, 6), num_cached_tokens=7),
        LegOutput(
            "b",
            finish_reason=FinishReason.STOP,
            timings=Timings(queue_s=1, prefill_s=2, transfer_s=3, transfer_bytes=4, decode_s=5),
            num_cached_tokens=8,
            leg_ended=True,
        ),
        LegOutput("c", error=error, leg_ended=True),
    ]
    load = load_to_proto(LoadReport(num_running=1, num_waiting=2, num_free_blocks=3, num_cached_blocks=4, num_blocks=5))
    reserved, step = news_frames(OwnerNews([Reservation("t", target)], outputs), load)
    assert reserved.reserved == worker_pb2.Reserved(transfer_id="t", target=TARGET)
    tokens, ended, failed = step.step.outputs
    assert (tokens.first_index, list(tokens.token_ids), tokens.leg_ended) == (3, [5, 6], False)
    assert tokens.num_cached_tokens == 7, "a first token that ends the request is all the router waits for"
    assert not tokens.HasField("error")
    assert (ended.finish_reason, ended.num_cached_tokens, ended.leg_ended) == (common_pb2.FINISH_REASON_STOP, 8, True)
    assert ended.timings == worker_pb2.Timings(queue_s=1, prefill_s=2, transfer_s=3, transfer_bytes=4, decode_s=5)
    assert failed.error == common_pb2.ErrorDetail(
        kind=common_pb2.ERROR_KIND_OVERLOADED, message="full", param="p", retry_after_ms=1500
    )
    assert step.step.load == load


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_finish_reason_has_its_number(reason):
    (step,) = news_frames(OwnerNews(outputs=[LegOutput("a", finish_reason=reason)]), worker_pb2.LoadReport())
    number = step.step.outputs[0].finish_reason
    assert common_pb2.FinishReason.Name(number) == f"FINISH_REASON_{reason.name}"
