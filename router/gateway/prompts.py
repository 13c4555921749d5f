"""What a client may ask to be continued, in whichever API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.tracing import TraceContext
from router.tenancy.tenant import ANONYMOUS, Tenant


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """messages: for the chat template; content is a string."""

    messages: Sequence[Mapping[str, Any]]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class AskedSampling:
    """As the client said it, types checked, ranges not. None: not said. max_tokens_field: under which name; likewise
    logprobs_field. logit_bias: by token id.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    prompt_logprobs: int | None = None
    n: int | None = None
    best_of: int | None = None
    include_stop: bool = False

    @property
    def num_choices(self) -> int:
        """Continuations that are generated; n of them are shown."""
        return max(self.n or 1, self.best_of or 1)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of one prompt, from HTTP or gRPC, before validation.

    model: "" for the only one. default_max_tokens: None: up to the context. timeouts_s: by field name, all that apply.
    prompt_param: the field that errors about the prompt name. trace: see GenerationSpec. priority: as said.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: AskedSampling
    default_max_tokens: int | None
    cache_salt: str
    timeouts_s: Mapping[str, float]
    received_at: float
    prompt_param: str = "prompt"
    trace: TraceContext | None = None
    tenant: Tenant = ANONYMOUS
    priority: int | None = None
