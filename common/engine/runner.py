"""What a scheduler needs of the engine: run one step, get its tokens. Schedulers' tests put a fake behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.engine.batch import ScheduledSequence
from common.errors import BatonError
from common.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledExtras:
    """What a step says of one sequence beside its token.

    error: it alone failed, and has no token; its new KV can't be trusted. logprobs: of the token. forks: a token, and
    its logprobs, for each of fork_seeds. prompt_logprobs: one for each of prompt_targets.
    """

    error: BatonError | None = None
    logprobs: TokenLogprobs | None = None
    forks: tuple[tuple[int, TokenLogprobs | None], ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """token_ids: one entry a sequence, in order: the sampled token's id, or None where sampling is None.

    extras: by index in the step, for those that asked for more, or failed.
    """

    token_ids: Sequence[int | None]
    extras: Mapping[int, SampledExtras] = field(default_factory=dict)


class Runner(Protocol):
    """One device's engine. `execute` blocks for a whole step: call it from a thread of its own, one call at a time."""

    def execute(self, scheduled: Sequence[ScheduledSequence]) -> StepResult:
        """Run a step."""
        ...
