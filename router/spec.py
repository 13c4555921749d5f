"""What the gateway hands inwards, and what comes back: nothing is checked again past here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from common.errors import BatonError
from common.logprobs import TokenLogprobs
from common.sampling_params import FinishReason, SamplingParams, choice_seed
from common.tracing import TraceContext
from router.tenancy.tenant import ANONYMOUS, Tenant

# What a client asked for, in OpenTelemetry's words.
Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One prompt to continue.

    request_id: the client's, for logs only. prompt_token_ids: not empty, inside the vocabulary, shorter than the
    context. stop: strings that end the text. hash_seed: 16 bytes; packed_hashes: the prompt's chain of block hashes,
    joined. received_at: monotonic seconds; deadline = received_at + timeout_s. trace: of the request's root span; None
    where it belongs to no trace. priority: its class, lower is more urgent. lease_id: of the tenant's quota.
    num_choices: continuations of the prompt; choice_index: which of them this is, once they are told apart.
    include_stop: the text keeps the stop string that ended it.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stop: tuple[str, ...]
    hash_seed: bytes
    packed_hashes: bytes
    received_at: float
    timeout_s: float
    operation: Operation = "text_completion"
    trace: TraceContext | None = None
    tenant: Tenant = ANONYMOUS
    priority: int = 0
    lease_id: str = ""
    num_choices: int = 1
    choice_index: int = 0
    include_stop: bool = False

    @property
    def deadline(self) -> float:
        return self.received_at + self.timeout_s

    @property
    def max_kv_tokens(self) -> int:
        """What it may come to hold in a decode worker: the prompt once, each choice's output by itself."""
        return len(self.prompt_token_ids) + self.num_choices * self.sampling.max_tokens

    def choices(self) -> list[GenerationSpec]:
        """One spec for each of num_choices, the first being this one; each is complete in itself."""
        return [self, *(self._choice(index) for index in range(1, self.num_choices))]

    def _choice(self, index: int) -> GenerationSpec:
        sampling = replace(self.sampling, seed=choice_seed(self.sampling.seed, index), prompt_logprobs=None)
        trace = None if self.trace is None else self.trace.sibling()
        return replace(self, sampling=sampling, trace=trace, choice_index=index)


@dataclass(frozen=True, slots=True)
class Usage:
    """completion_tokens counts an end-of-sequence token. cached_tokens: of the prompt, found in a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def plus(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage


End = Finished | BatonError


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one request since the last look: tokens (perhaps none), and its end once all tokens were handed out.

    logprobs: one for each token, where asked for. prompt_logprobs: of the prompt's tokens but the first, with the first
    output token.
    """

    token_ids: Sequence[int]
    end: End | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
