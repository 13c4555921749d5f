"""From what a client asked to what the cluster runs. HTTP and gRPC pass through here; every user error ends here."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from common.errors import BatonError, ErrorKind, invalid
from common.kvcache.block_hash import chain_hashes, hash_seed
from common.sampling_params import SamplingParams
from router.gateway.prompts import Asked, AskedSampling, ChatPrompt, Prompt, TextPrompt
from router.gateway.state import GatewayState, ServedModel
from router.spec import GenerationSpec, Operation

# Prompts up to here are tokenized and hashed on the event loop, in less time than a thread's hand-over would take.
INLINE_CHARS: Final = 2048
INLINE_TOKENS: Final = 1024
INLINE_MESSAGES: Final = 32
MAX_STOP_STRINGS: Final = 4
MAX_STOP_TOKEN_IDS: Final = 128
MAX_STOP_CHARS: Final = 1024
MAX_SALT_CHARS: Final = 256
MAX_PRIORITY: Final = 1000
MAX_LOGIT_BIAS: Final = 300
MAX_LOGPROBS: Final = 20
MAX_REPETITION_PENALTY: Final = 10.0
MAX_SEED: Final = (1 << 64) - 1


async def prepare(state: GatewayState, asked: Asked) -> GenerationSpec:
    """Check everything, tokenize, hash. Raises BatonError of a user kind, naming the field."""
    model = state.model
    check_model(model, asked.model)
    check_sampling(asked.sampling)
    check_choices(asked.sampling, state.settings.max_choices)
    if len(asked.cache_salt) > MAX_SALT_CHARS:
        raise invalid(f"`cache_salt` is longer than {MAX_SALT_CHARS} characters", "cache_salt")
    _check_range("priority", asked.priority, -MAX_PRIORITY, MAX_PRIORITY)
    timeout_s = resolve_timeout(asked.timeouts_s, state.settings.request_timeout_s)

    def work() -> tuple[Sequence[int], SamplingParams, bytes, bytes]:
        token_ids = encode_prompt(model, asked.prompt, asked.prompt_param)
        sampling = resolve_sampling(asked, model, len(token_ids))
        seed = hash_seed(model.fingerprint, asked.cache_salt, tenant=asked.tenant.cache_scope)
        return token_ids, sampling, seed, b"".join(chain_hashes(seed, token_ids, model.block_size))

    if _is_short(asked.prompt):
        token_ids, sampling, seed, packed_hashes = work()
    else:
        loop = asyncio.get_running_loop()
        token_ids, sampling, seed, packed_hashes = await loop.run_in_executor(state.executor, work)
    lease_id = await state.quotas.acquire(asked.tenant, len(token_ids)) if asked.tenant.has_quota else ""
    return GenerationSpec(
        request_id=asked.request_id,
        prompt_token_ids=token_ids,
        sampling=sampling,
        stop=asked.sampling.stop,
        hash_seed=seed,
        packed_hashes=packed_hashes,
        received_at=asked.received_at,
        timeout_s=timeout_s,
        operation=operation_of(asked.prompt),
        trace=asked.trace,
        tenant=asked.tenant,
        priority=asked.tenant.priority_of(asked.priority),
        lease_id=lease_id,
        num_choices=asked.sampling.num_choices,
        include_stop=asked.sampling.include_stop,
    )


def check_model(model: ServedModel, name: str) -> None:
    """Raises UNKNOWN_MODEL unless `name` is the served model's, or empty."""
    if name and name != model.name:
        message = f"The model `{name[:200]}` does not exist; this server has `{model.name}`."
        raise BatonError(ErrorKind.UNKNOWN_MODEL, message, param="model")


def check_sampling(asked: AskedSampling) -> None:
    """Raises for what is out of range whatever the prompt."""
    _check_range("temperature", asked.temperature, 0.0, 2.0)
    _check_range("top_p", asked.top_p, 0.0, 1.0, above=True)
    _check_range("min_p", asked.min_p, 0.0, 1.0)
    _check_range("top_k", asked.top_k, -1, (1 << 31) - 1)
    _check_range("seed", asked.seed, -(1 << 63), MAX_SEED)
    _check_range(asked.max_tokens_field, asked.max_tokens, 1, math.inf)
    _check_range("min_tokens", asked.min_tokens, 0, math.inf)
    _check_range("presence_penalty", asked.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", asked.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", asked.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, above=True)
    _check_range(asked.logprobs_field, asked.logprobs, 0, MAX_LOGPROBS)
    _check_range("prompt_logprobs", asked.prompt_logprobs, 0, MAX_LOGPROBS)
    if len(asked.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid(f"`logit_bias` has more than {MAX_LOGIT_BIAS} entries", "logit_bias")
    for token_id, bias in asked.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            raise invalid(f"`logit_bias` of token {token_id} must be from -100 to 100, found {bias}", "logit_bias")
    if len(asked.stop) > MAX_STOP_STRINGS:
        raise invalid(f"`stop` has {len(asked.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    if not all(asked.stop):
        raise invalid("`stop` contains an empty string", "stop")
    if any(len(s) > MAX_STOP_CHARS for s in asked.stop):
        raise invalid(f"`stop` contains a string of more than {MAX_STOP_CHARS} characters", "stop")
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"`stop_token_ids` has more than {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")


def check_choices(asked: AskedSampling, max_choices: int) -> None:
    """Raises where `n` or `best_of` is out of bounds, or the one contradicts the other."""
    _check_range("n", asked.n, 1, max_choices)
    _check_range("best_of", asked.best_of, 1, max_choices)
    if asked.best_of is not None and asked.best_of < (asked.n or 1):
        raise invalid(f"`best_of` ({asked.best_of}) must be at least `n` ({asked.n or 1})", "best_of")


def resolve_timeout(asked_s: Mapping[str, float], bound_s: float) -> float:
    """The smallest of what was asked for, never more than the router's own bound."""
    for field, value in asked_s.items():
        if not value > 0 or math.isinf(value):
            raise invalid(f"`{field}` must be a positive number of seconds, found {value}", field)
    return min((*asked_s.values(), bound_s))


def encode_prompt(model: ServedModel, prompt: Prompt, param: str) -> Sequence[int]:
    """Token ids, at least one, all in the vocabulary."""
    if isinstance(prompt, TextPrompt):
        _check_text_length(model, prompt.text, param)
        token_ids: Sequence[int] = model.encoder.encode(prompt.text, True) if prompt.text else ()
    elif isinstance(prompt, ChatPrompt):
        text = model.render_chat(prompt.messages)
        _check_text_length(model, text, param)
        token_ids = model.encoder.encode(text, False)
    else:
        token_ids = prompt.token_ids
        _check_vocabulary(token_ids, model.vocab_size, param)
    if not token_ids:
        raise invalid(f"`{param}` is empty: there is nothing to continue", param)
    return token_ids


def resolve_sampling(asked: Asked, model: ServedModel, num_prompt_tokens: int) -> SamplingParams:
    """Every field final. Raises CONTEXT_LENGTH where prompt and completion don't fit the context together."""
    sampling = asked.sampling
    _check_vocabulary(sampling.stop_token_ids, model.vocab_size, "stop_token_ids")
    _check_vocabulary(tuple(sampling.logit_bias), model.vocab_size, "logit_bias")
    room = model.max_model_len - num_prompt_tokens
    if room < 1 or (sampling.max_tokens is not None and sampling.max_tokens > room):
        completion = 1 if sampling.max_tokens is None else sampling.max_tokens
        raise BatonError(
            ErrorKind.CONTEXT_LENGTH,
            f"This model's maximum context length is {model.max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens + completion} tokens ({num_prompt_tokens} in the prompt, {completion} for the "
            "completion). Please reduce the length of the prompt or of the completion.",
            param=asked.prompt_param if room < 1 else sampling.max_tokens_field,
        )
    default = room if asked.default_max_tokens is None else min(asked.default_max_tokens, room)
    max_tokens = default if sampling.max_tokens is None else sampling.max_tokens
    min_tokens = sampling.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"`min_tokens` ({min_tokens}) is more than the bound on the output, {max_tokens}", "min_tokens")
    # The best of several is found by what they say of themselves.
    ranked = (sampling.best_of or 1) > (sampling.n or 1)
    eos = () if sampling.ignore_eos else model.eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_k=max(0, sampling.top_k or 0),  # -1 and 0 both mean off
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        min_p=sampling.min_p or 0.0,
        seed=secrets.randbits(64) if sampling.seed is None else sampling.seed & MAX_SEED,
        stop_token_ids=tuple(dict.fromkeys((*eos, *sampling.stop_token_ids))),
        min_tokens=min_tokens,
        presence_penalty=sampling.presence_penalty or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        logprobs=0 if ranked and sampling.logprobs is None else sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def operation_of(prompt: Prompt) -> Operation:
    return "chat" if isinstance(prompt, ChatPrompt) else "text_completion"


def _is_short(prompt: Prompt) -> bool:
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) <= INLINE_CHARS
    if isinstance(prompt, ChatPrompt):
        # The template's own text counts, too: a message of nothing becomes some tokens.
        few = len(prompt.messages) <= INLINE_MESSAGES
        return few and sum(len(str(v or "")) for m in prompt.messages for v in m.values()) <= INLINE_CHARS
    return len(prompt.token_ids) <= INLINE_TOKENS


def _check_text_length(model: ServedModel, text: str, param: str) -> None:
    """Raises CONTEXT_LENGTH for what can't fit, however it is tokenized: that would take seconds and gigabytes."""
    if len(text) > model.max_prompt_chars:
        raise BatonError(
            ErrorKind.CONTEXT_LENGTH,
            f"This model's maximum context length is {model.max_model_len} tokens, which hold at most "
            f"{model.max_prompt_chars} characters. However, your prompt has {len(text)} characters. Please reduce its "
            "length.",
            param=param,
        )


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise invalid(f"`{param}` contains token id {token_id}; the vocabulary has 0 to {vocab_size - 1}", param)


def _check_range(field: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    """above: `low` itself is out of range."""
    if value is None or (low <= value <= high and not (above and value == low)):
        return
    bounds = f"at least {low:g}" if math.isinf(high) else f"{'above' if above else 'from'} {low:g} to {high:g}"
    raise invalid(f"`{field}` must be {bounds}, found {value}", field)
