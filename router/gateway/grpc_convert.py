"""Public gRPC API: protobuf to and from the gateway's own types."""

from __future__ import annotations

from baton.inference.v1 import inference_pb2
from common.errors import BatonError, invalid
from common.rpc import convert as rpc_convert
from common.rpc.worker_convert import logprobs_to_proto
from common.tracing import TraceContext
from router.gateway.generation import TextDelta
from router.gateway.prompts import Asked, AskedSampling, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.gateway.state import ServedModel
from router.spec import Finished
from router.tenancy.tenant import Tenant


def asked_from_proto(
    start: inference_pb2.StartGeneration,
    received_at: float,
    deadline_s: float | None,
    trace: TraceContext | None,
    tenant: Tenant,
) -> Asked:
    """deadline_s: what is left of the call's own deadline. Raises INVALID_REQUEST for a missing prompt."""
    timeouts_s: dict[str, float] = {}
    if start.timeout_ms:
        timeouts_s["timeout_ms"] = start.timeout_ms / 1000
    if deadline_s is not None:
        timeouts_s["grpc-timeout"] = max(deadline_s, 0.001)
    prompt, param = _prompt(start)
    return Asked(
        request_id=start.request_id,
        model=start.model,
        prompt=prompt,
        sampling=_sampling(start.sampling),
        default_max_tokens=None,
        cache_salt=start.cache_salt,
        timeouts_s=timeouts_s,
        received_at=received_at,
        prompt_param=param,
        trace=trace,
        tenant=tenant,
        priority=start.priority if start.HasField("priority") else None,
    )


def chunk_to_proto(request_id: str, index: int, delta: TextDelta) -> inference_pb2.GenerateResponse:
    chunk = inference_pb2.TokenChunk(
        first_index=delta.first_index, token_ids=delta.token_ids, text=delta.text, index=index
    )
    if isinstance(delta.end, Finished):
        chunk.finish_reason = rpc_convert.finish_reason_to_proto(delta.end.reason)
    if delta.logprobs:
        chunk.logprobs.extend(logprobs_to_proto(delta.logprobs))
    if delta.prompt_logprobs:
        chunk.prompt_logprobs.extend(logprobs_to_proto(delta.prompt_logprobs))
    return inference_pb2.GenerateResponse(request_id=request_id, chunk=chunk)


def finished_to_proto(request_id: str, end: Finished) -> inference_pb2.GenerateResponse:
    usage = inference_pb2.Usage(
        prompt_tokens=end.usage.prompt_tokens,
        completion_tokens=end.usage.completion_tokens,
        cached_tokens=end.usage.cached_tokens,
    )
    finished = inference_pb2.GenerationFinished(
        finish_reason=rpc_convert.finish_reason_to_proto(end.reason), usage=usage
    )
    return inference_pb2.GenerateResponse(request_id=request_id, finished=finished)


def error_to_proto(request_id: str, error: BatonError) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(request_id=request_id, error=rpc_convert.error_to_proto(error))


def model_to_proto(model: ServedModel) -> inference_pb2.Model:
    return inference_pb2.Model(id=model.name, max_model_len=model.max_model_len)


def _prompt(start: inference_pb2.StartGeneration) -> tuple[Prompt, str]:
    kind = start.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(start.text), "text"
    if kind == "tokens":
        return TokenPrompt(list(start.tokens.token_ids)), "tokens"
    if kind == "chat":
        if not start.chat.messages:
            raise invalid("`chat` has no messages: there is nothing to answer", "chat")
        return ChatPrompt([{"role": m.role, "content": m.content} for m in start.chat.messages]), "chat"
    raise invalid("the prompt is missing: set text, tokens or chat", "prompt")


def _sampling(sampling: inference_pb2.SamplingParams) -> AskedSampling:
    # protobuf floats are 32 bits wide: 0.9 arrives as 0.899999976.
    return AskedSampling(
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        n=sampling.n if sampling.HasField("n") else None,
        include_stop=sampling.include_stop_str_in_output,
    )
