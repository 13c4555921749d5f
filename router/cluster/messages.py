"""What a request hears of its legs. What the two sides say to each other: common/rpc/worker_messages.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError
from common.logprobs import TokenLogprobs
from common.rpc.worker_messages import Timings, TransferTarget
from common.sampling_params import FinishReason


@dataclass(frozen=True, slots=True)
class LegNews:
    """The rare part of a leg's frame: its last one, or the one with the token that ends the request.

    num_output_tokens: length of the whole output where finish_reason came with a token, else None. num_wanted_blocks:
    not 0 where it is about a preempted sequence that may move to a decode worker with so many free blocks.
    """

    finish_reason: FinishReason | None
    num_output_tokens: int | None
    leg_ended: bool
    error: BatonError | None
    num_cached_tokens: int
    timings: Timings
    num_wanted_blocks: int = 0


class LegListener(Protocol):
    """Told of one transfer_id's frames, on the event loop; must not block. `on_lost` or a last `on_news` ends it."""

    def on_reserved(self, target: TransferTarget) -> None: ...

    def on_tokens(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None: ...

    def on_prompt_logprobs(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None: ...

    def on_news(self, news: LegNews) -> None: ...

    def on_lost(self, error: BatonError) -> None: ...
