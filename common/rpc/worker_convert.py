"""worker_messages.py to and from protobuf: one direction is a router's, the other a worker's."""

from __future__ import annotations

from collections.abc import Iterable

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2
from common.logprobs import TokenLogprobs
from common.rpc.worker_messages import (
    Fork,
    LoadReport,
    PullSource,
    SequenceSpec,
    Timings,
    TransferTarget,
    WorkerIdentity,
)
from common.sampling_params import SamplingParams
from common.step_rates import StepRates


def spec_to_proto(spec: SequenceSpec, now: float) -> worker_pb2.SequenceSpec:
    """now: monotonic seconds, when the frame is made."""
    return worker_pb2.SequenceSpec(
        transfer_id=spec.transfer_id,
        request_id=spec.request_id,
        token_ids=spec.token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        hash_seed=spec.hash_seed,
        sampling=sampling_to_proto(spec.sampling),
        timeout_ms=max(1, int((spec.deadline - now) * 1000)),
        traceparent=spec.traceparent,
        forks=[worker_pb2.Fork(transfer_id=fork.transfer_id, seed=fork.seed) for fork in spec.forks],
        priority=spec.priority,
    )


def spec_from_proto(spec: worker_pb2.SequenceSpec, now: float, max_timeout_s: float) -> SequenceSpec:
    """The deadline counts from `now`, monotonic, and is at most max_timeout_s away."""
    return SequenceSpec(
        transfer_id=spec.transfer_id,
        request_id=spec.request_id,
        token_ids=list(spec.token_ids),
        num_prompt_tokens=spec.num_prompt_tokens,
        hash_seed=spec.hash_seed,
        sampling=sampling_from_proto(spec.sampling),
        deadline=now + min(spec.timeout_ms / 1e3, max_timeout_s),
        traceparent=spec.traceparent,
        forks=tuple(Fork(fork.transfer_id, fork.seed) for fork in spec.forks),
        priority=spec.priority,
    )


def sampling_to_proto(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    return worker_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_proto(sampling: worker_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=tuple(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def target_to_proto(target: TransferTarget) -> worker_pb2.TransferTarget:
    return worker_pb2.TransferTarget(
        address=target.address,
        worker_id=target.worker.worker_id,
        epoch=target.worker.epoch,
        secret=target.secret,
        num_cached_tokens=target.num_cached_tokens,
        pull_secret=target.pull_secret,
    )


def target_from_proto(target: worker_pb2.TransferTarget) -> TransferTarget:
    worker = WorkerIdentity(target.worker_id, target.epoch)
    return TransferTarget(target.address, worker, target.secret, target.num_cached_tokens, target.pull_secret)


def source_to_proto(source: PullSource) -> worker_pb2.PullSource:
    return worker_pb2.PullSource(
        address=source.address,
        worker_id=source.worker.worker_id,
        epoch=source.worker.epoch,
        secret=source.secret,
        num_tokens=source.num_tokens,
    )


def source_from_proto(source: worker_pb2.PullSource) -> PullSource:
    worker = WorkerIdentity(source.worker_id, source.epoch)
    return PullSource(source.address, worker, source.secret, source.num_tokens)


def timings_to_proto(timings: Timings) -> worker_pb2.Timings:
    return worker_pb2.Timings(
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        transfer_s=timings.transfer_s,
        transfer_bytes=timings.transfer_bytes,
        decode_s=timings.decode_s,
    )


def timings_from_proto(timings: worker_pb2.Timings) -> Timings:
    return Timings(
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        transfer_s=timings.transfer_s,
        transfer_bytes=timings.transfer_bytes,
        decode_s=timings.decode_s,
    )


def load_to_proto(load: LoadReport) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_blocks=load.num_blocks,
        queued_prefill_tokens=load.queued_prefill_tokens,
        prefix_queries_total=load.prefix_queries_total,
        prefix_hits_total=load.prefix_hits_total,
        step_rates=None if load.step_rates is None else _rates_to_proto(load.step_rates),
        engine_beats=load.engine_beats,
        engine_stalled=load.engine_stalled,
        draining=load.draining,
    )


def load_from_proto(load: worker_pb2.LoadReport) -> LoadReport:
    return LoadReport(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_blocks=load.num_blocks,
        queued_prefill_tokens=load.queued_prefill_tokens,
        prefix_queries_total=load.prefix_queries_total,
        prefix_hits_total=load.prefix_hits_total,
        step_rates=_rates_from_proto(load.step_rates) if load.HasField("step_rates") else None,
        engine_beats=load.engine_beats,
        engine_stalled=load.engine_stalled,
        draining=load.draining,
    )


def logprobs_to_proto(logprobs: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(
            token_id=each.token_id,
            logprob=each.logprob,
            rank=each.rank,
            top_token_ids=[token_id for token_id, _ in each.top],
            top_logprobs=[logprob for _, logprob in each.top],
        )
        for each in logprobs
    ]


def logprobs_from_proto(logprobs: Iterable[common_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            each.token_id, each.logprob, each.rank, tuple(zip(each.top_token_ids, each.top_logprobs, strict=False))
        )
        for each in logprobs
    ]


def _rates_to_proto(rates: StepRates) -> worker_pb2.StepRates:
    return worker_pb2.StepRates(
        base_s=rates.base_s, prefill_token_s=rates.prefill_token_s, decode_token_s=rates.decode_token_s
    )


def _rates_from_proto(rates: worker_pb2.StepRates) -> StepRates:
    return StepRates(rates.base_s, rates.prefill_token_s, rates.decode_token_s)
