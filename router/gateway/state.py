"""What every endpoint reads: the served model, and the parts that a request passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from common.config import Settings
from common.errors import BatonError
from common.tracing import TraceContext, TraceSampler
from router.cluster.fleet import Fleet
from router.dispatcher import Dispatcher
from router.gateway.text_stream import Detokenizer
from router.metrics import RouterMetrics
from router.observers import Observers
from router.request_record import Failure, Refusal
from router.spec import Operation
from router.tenancy.directory import TenantDirectory
from router.tenancy.quota import Quotas
from router.timeline import Timeline


class Encoder(Protocol):
    """common/model/tokenizer.py's Tokenizer, as far as the gateway uses it. Thread-safe."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


class ChatRenderer(Protocol):
    """common/model/chat_template.py's ChatTemplate.render. Thread-safe. Raises BatonError for a refusal."""

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> str: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """created: Unix seconds. vocab_size: rows of the embedding. max_prompt_chars: more text can't fit the context.
    token_bytes: what one token stands for, perhaps part of a character.
    """

    name: str
    fingerprint: str
    created: int
    max_model_len: int
    max_prompt_chars: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    encoder: Encoder
    render_chat: ChatRenderer
    new_detokenizer: Callable[[], Detokenizer]
    token_bytes: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class GatewayState:
    """executor: threads for work on long prompts. clock: monotonic seconds, the event loop's."""

    settings: Settings
    model: ServedModel
    dispatcher: Dispatcher
    fleet: Fleet
    metrics: RouterMetrics
    observers: Observers
    timeline: Timeline
    sampler: TraceSampler
    executor: Executor
    clock: Callable[[], float]
    tenants: TenantDirectory
    quotas: Quotas

    def refuse(
        self, error: BatonError, request_id: str, trace: TraceContext | None, operation: Operation, received_at: float
    ) -> None:
        """Tell all observers of a request that never ran."""
        failure = Failure.of(error)
        self.observers.on_refused(Refusal(request_id, trace, operation, failure, received_at, self.clock()))

    @property
    def ready(self) -> bool:
        """Whether a request that comes now would be served."""
        return self.dispatcher.accepting and self.fleet.ready
