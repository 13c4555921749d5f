"""What the router and a worker say to each other, without protobuf. See protos/baton/worker/v1/worker.proto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError
from common.sampling_params import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One attempt of one request, as both legs are told of it.

    token_ids: the prompt, then the tokens emitted by earlier attempts. hash_seed: 16 bytes, parent of the first
    block's hash. timeout_ms: what is left of the deadline at the moment of sending. traceparent: W3C trace context.
    """

    transfer_id: str
    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    hash_seed: bytes
    sampling: SamplingParams
    timeout_ms: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """Where a reservation waits; the router only passes it from decode to prefill."""

    address: str
    worker_id: str
    epoch: str
    secret: bytes
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and bytes as one leg measured them; 0 for phases it has not."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LegNews:
    """The rare part of a leg's frame: its last one, or the one with the token that ends the request.

    num_output_tokens: length of the whole output where finish_reason came with a token, else None.
    """

    finish_reason: FinishReason | None
    num_output_tokens: int | None
    leg_ended: bool
    error: BatonError | None
    num_cached_tokens: int
    timings: Timings


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's own figures after a step; counts are of the whole worker, all routers' requests together."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    queued_prefill_tokens: int


class LegListener(Protocol):
    """Told of one transfer_id's frames, on the event loop; must not block. `on_lost` or a last `on_news` ends it."""

    def on_reserved(self, target: TransferTarget) -> None: ...

    def on_tokens(self, first_index: int, token_ids: Sequence[int]) -> None: ...

    def on_news(self, news: LegNews) -> None: ...

    def on_lost(self, error: BatonError) -> None: ...
