"""What the gateway hands inwards, and what comes back: nothing is checked again past here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.errors import BatonError
from common.sampling_params import FinishReason, SamplingParams
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

    @property
    def deadline(self) -> float:
        return self.received_at + self.timeout_s


@dataclass(frozen=True, slots=True)
class Usage:
    """completion_tokens counts an end-of-sequence token. cached_tokens: of the prompt, found in a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    usage: Usage


End = Finished | BatonError


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one request since the last look: tokens (perhaps none), and its end once all tokens were handed out."""

    token_ids: Sequence[int]
    end: End | None
