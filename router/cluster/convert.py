"""Worker protocol: protobuf frames to and from what a router knows."""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.v1 import worker_pb2
from common.rpc.convert import error_from_proto, finish_reason_from_proto
from common.rpc.worker_convert import source_to_proto, spec_to_proto, target_to_proto, timings_from_proto
from common.rpc.worker_messages import PullSource, SequenceSpec, TransferTarget
from router.cluster.messages import LegNews


def hello_frame(router_id: str, epoch: str) -> worker_pb2.SessionRequest:
    return worker_pb2.SessionRequest(hello=worker_pb2.Hello(router_id=router_id, epoch=epoch))


def reserve_frame(spec: SequenceSpec, now: float, *, prefill_here: bool) -> worker_pb2.SessionRequest:
    command = worker_pb2.ReserveCommand(spec=spec_to_proto(spec, now), prefill_here=prefill_here)
    return worker_pb2.SessionRequest(reserve=command)


def prefill_frame(
    spec: SequenceSpec, target: TransferTarget, now: float, pull_sources: Sequence[PullSource] = ()
) -> worker_pb2.SessionRequest:
    command = worker_pb2.PrefillCommand(
        spec=spec_to_proto(spec, now),
        target=target_to_proto(target),
        pull_sources=[source_to_proto(source) for source in pull_sources],
    )
    return worker_pb2.SessionRequest(prefill=command)


def abort_frame(transfer_id: str) -> worker_pb2.SessionRequest:
    return worker_pb2.SessionRequest(abort=worker_pb2.AbortCommand(transfer_id=transfer_id))


def has_news(output: worker_pb2.SequenceOutput) -> bool:
    """False for a frame that holds tokens and nothing else, as nearly all do."""
    return output.leg_ended or output.finish_reason != 0 or output.num_wanted_blocks != 0 or output.HasField("error")


def news_from_proto(output: worker_pb2.SequenceOutput) -> LegNews:
    num_tokens = len(output.token_ids)
    return LegNews(
        finish_reason=finish_reason_from_proto(output.finish_reason),
        num_output_tokens=output.first_index + num_tokens if num_tokens else None,
        leg_ended=output.leg_ended,
        error=error_from_proto(output.error) if output.HasField("error") else None,
        num_cached_tokens=output.num_cached_tokens,
        timings=timings_from_proto(output.timings),
        num_wanted_blocks=output.num_wanted_blocks,
    )
