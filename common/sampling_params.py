"""What a request asks of the sampler, resolved: no field is optional past the gateway."""

from __future__ import annotations

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
    max_tokens: bound on the whole output. stop_token_ids: EOS ids included unless ignore_eos was asked for.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def finish_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """Whether `token_id`, as output token number `num_output_tokens` (counted from 1), ends the sequence."""
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_tokens else None
