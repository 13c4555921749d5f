"""Worker protocol: protobuf frames to and from router/cluster/messages.py."""

from __future__ import annotations

from baton.worker.v1 import worker_pb2
from common.rpc.convert import error_from_proto, finish_reason_from_proto
from common.sampling_params import SamplingParams
from router.cluster.messages import LegNews, LoadReport, SequenceSpec, Timings, TransferTarget


def hello_frame(router_id: str, epoch: str) -> worker_pb2.SessionRequest:
    return worker_pb2.SessionRequest(hello=worker_pb2.Hello(router_id=router_id, epoch=epoch))


def reserve_frame(spec: SequenceSpec, *, prefill_here: bool) -> worker_pb2.SessionRequest:
    command = worker_pb2.ReserveCommand(spec=_spec_to_proto(spec), prefill_here=prefill_here)
    return worker_pb2.SessionRequest(reserve=command)


def prefill_frame(spec: SequenceSpec, target: TransferTarget) -> worker_pb2.SessionRequest:
    command = worker_pb2.PrefillCommand(
        spec=_spec_to_proto(spec),
        target=worker_pb2.TransferTarget(
            address=target.address,
            worker_id=target.worker_id,
            epoch=target.epoch,
            secret=target.secret,
            num_cached_tokens=target.num_cached_tokens,
        ),
    )
    return worker_pb2.SessionRequest(prefill=command)


def abort_frame(transfer_id: str) -> worker_pb2.SessionRequest:
    return worker_pb2.SessionRequest(abort=worker_pb2.AbortCommand(transfer_id=transfer_id))


def target_from_proto(target: worker_pb2.TransferTarget) -> TransferTarget:
    return TransferTarget(
        address=target.address,
        worker_id=target.worker_id,
        epoch=target.epoch,
        secret=target.secret,
        num_cached_tokens=target.num_cached_tokens,
    )


def has_news(output: worker_pb2.SequenceOutput) -> bool:
    """False for a frame that holds tokens and nothing else, as nearly all do."""
    return output.leg_ended or output.finish_reason != 0 or output.HasField("error")


def news_from_proto(output: worker_pb2.SequenceOutput) -> LegNews:
    timings = output.timings
    num_tokens = len(output.token_ids)
    return LegNews(
        finish_reason=finish_reason_from_proto(output.finish_reason),
        num_output_tokens=output.first_index + num_tokens if num_tokens else None,
        leg_ended=output.leg_ended,
        error=error_from_proto(output.error) if output.HasField("error") else None,
        num_cached_tokens=output.num_cached_tokens,
        timings=Timings(
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            transfer_s=timings.transfer_s,
            transfer_bytes=timings.transfer_bytes,
            decode_s=timings.decode_s,
        ),
    )


def load_from_proto(load: worker_pb2.LoadReport) -> LoadReport:
    return LoadReport(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        queued_prefill_tokens=load.queued_prefill_tokens,
    )


def _spec_to_proto(spec: SequenceSpec) -> worker_pb2.SequenceSpec:
    return worker_pb2.SequenceSpec(
        transfer_id=spec.transfer_id,
        request_id=spec.request_id,
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        hash_seed=spec.hash_seed,
        sampling=_sampling_to_proto(spec.sampling),
        timeout_ms=spec.timeout_ms,
        traceparent=spec.traceparent,
    )


def _sampling_to_proto(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    return worker_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )
