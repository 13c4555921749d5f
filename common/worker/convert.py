"""Worker protocol: protobuf frames to and from common/engine/messages.py."""

from __future__ import annotations

from typing import Final

from baton.worker.v1 import worker_pb2
from common.engine.messages import (
    AbortCommand,
    Command,
    LegOutput,
    OwnerNews,
    PrefillCommand,
    Reservation,
    ReserveCommand,
)
from common.rpc.convert import error_to_proto, finish_reason_to_proto
from common.rpc.worker_convert import (
    logprobs_to_proto,
    source_from_proto,
    spec_from_proto,
    target_from_proto,
    target_to_proto,
    timings_to_proto,
)
from common.worker.info import BEAT_S, WorkerInfo

# More would not be asked before computing is done.
MAX_PULL_SOURCES: Final = 4
_ROLES: Final = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}


def command_from_proto(
    frame: worker_pb2.SessionRequest, owner: int, now: float, max_timeout_s: float
) -> Command | None:
    """None for a frame that carries no command. Deadlines count from `now`, monotonic, and are at most max_timeout_s
    away."""
    match frame.WhichOneof("frame"):
        case "reserve":
            spec = spec_from_proto(frame.reserve.spec, now, max_timeout_s)
            return ReserveCommand(owner, spec, frame.reserve.prefill_here)
        case "prefill":
            spec = spec_from_proto(frame.prefill.spec, now, max_timeout_s)
            sources = tuple(map(source_from_proto, frame.prefill.pull_sources[:MAX_PULL_SOURCES]))
            return PrefillCommand(owner, spec, target_from_proto(frame.prefill.target), sources)
        case "abort":
            return AbortCommand(owner, frame.abort.transfer_id)
        case _:
            return None


def info_to_proto(info: WorkerInfo) -> worker_pb2.GetInfoResponse:
    return worker_pb2.GetInfoResponse(
        worker_id=info.worker_id,
        epoch=info.epoch,
        role=_ROLES[info.role],
        model_name=info.model_name,
        model_fingerprint=info.model_fingerprint,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        dtype=info.dtype,
        heartbeat_ms=round(BEAT_S * 1e3),
    )


def welcome_frame(info: WorkerInfo) -> worker_pb2.SessionResponse:
    return worker_pb2.SessionResponse(welcome=worker_pb2.Welcome(info=info_to_proto(info)))


def news_frames(news: OwnerNews | None, load: worker_pb2.LoadReport) -> list[worker_pb2.SessionResponse]:
    """Reservations, then one StepOutput with all outputs and the load. None: only the load."""
    frames: list[worker_pb2.SessionResponse] = []
    outputs: list[worker_pb2.SequenceOutput] = []
    if news is not None:
        frames = [worker_pb2.SessionResponse(reserved=_reserved_to_proto(r)) for r in news.reservations]
        outputs = [_output_to_proto(output) for output in news.outputs]
    frames.append(worker_pb2.SessionResponse(step=worker_pb2.StepOutput(outputs=outputs, load=load)))
    return frames


def _reserved_to_proto(reservation: Reservation) -> worker_pb2.Reserved:
    return worker_pb2.Reserved(transfer_id=reservation.transfer_id, target=target_to_proto(reservation.target))


def _output_to_proto(output: LegOutput) -> worker_pb2.SequenceOutput:
    message = worker_pb2.SequenceOutput(
        transfer_id=output.transfer_id, first_index=output.first_index, token_ids=output.token_ids
    )
    # What follows is rare: nearly all frames are a token and nothing else.
    if output.finish_reason is not None:
        message.finish_reason = finish_reason_to_proto(output.finish_reason)
    if output.num_cached_tokens:
        message.num_cached_tokens = output.num_cached_tokens
    if output.leg_ended:
        message.leg_ended = True
    if output.error is not None:
        message.error.CopyFrom(error_to_proto(output.error))
    if output.timings is not None:
        message.timings.CopyFrom(timings_to_proto(output.timings))
    if output.logprobs:
        message.logprobs.extend(logprobs_to_proto(output.logprobs))
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(logprobs_to_proto(output.prompt_logprobs))
        message.first_prompt_index = output.first_prompt_index
    if output.num_wanted_blocks:
        message.num_wanted_blocks = output.num_wanted_blocks
    return message
