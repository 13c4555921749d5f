"""What a request asks of the sampler, resolved: no field is optional past the gateway."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's, `abort` is ours and reaches no client."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """
    temperature: 0 is greedy; else logits are divided by it.
    top_k: 0 is off. top_p: 1.0 is off. min_p: 0.0 is off; relative to the likeliest token's probability.
    seed: 64 bits; token i's randomness depends on (seed, i) alone, i counted from the first output token.
    max_tokens: bound on the whole output. stop_token_ids: EOS ids included unless ignore_eos was asked for; none of
    them is drawn before min_tokens others.
    presence_penalty, frequency_penalty: 0 is off; over the output's tokens. repetition_penalty: 1 is off; over prompt
    and output. logit_bias: (token id, what is added to its logit), by id.
    logprobs: None: none; else each output token comes with its logprob and so many of the likeliest tokens.
    prompt_logprobs: likewise for the prompt's tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's own."""
        return bool(self.logit_bias) or self.min_tokens > 0 or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def needs_extras(self) -> bool:
        """Whether a step must know more of the sequence than its sampling parameters, or tell more than its token."""
        return self.changes_logits or self.logprobs is not None or self.prompt_logprobs is not None

    def finish_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Whether `token_id`, as output token number `num_output_tokens` (counted from 1), ends the sequence."""
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_tokens else None


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `n` > 1: 64 bits. Choice 0 has the request's own.

    So choice j is the same in every run, and the same as that of a request with n = 1 and this seed.
    """
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"baton-choice").digest(), "little")
