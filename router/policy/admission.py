"""How much may be with the workers at once, and what is refused at once because it would wait in vain. Pure.

    queue ──► [ prefill window: prompt tokens without a first token ] ──► [ running window: sequences that decode ]
               follows measured TTFT against its target                     follows measured ITL against its target

What does not fit waits in the router, where the fair queue decides who is next; workers' own queues stay short, so that
a tenant's burst can't stand before others there. Windows move as TCP's do: a bit up while they were the limit and the
target held, by a factor down where it did not (Chiu & Jain 1989).

    predicted TTFT = (prompt tokens at workers + those that go before it + its own) / measured prefill rate
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DECREASE: Final = 0.7
INCREASE: Final = 1.15
# A window is moved on evidence of at least so many samples.
MIN_SAMPLES: Final = 4
FIRST_PREFILL_TOKENS: Final = 4096.0
MIN_PREFILL_TOKENS: Final = 256.0
MAX_PREFILL_TOKENS: Final = float(1 << 20)
MIN_RUNNING: Final = 16.0
MAX_RUNNING: Final = 4096.0
# Weight of the newest interval in the rate of prefill.
RATE_SMOOTHING: Final = 0.3


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds. ttft_s: from a prompt's way to the workers to its first token."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Interval:
    """What was measured since the last adjustment.

    mean_ttft_s, mean_itl_s: over num_first_tokens and num_gaps. prefilled_tokens: of prompts with a first
    token. busy_s: time with a prompt at the workers. prefill_was_limit, running_was_limit: something waited for it.
    """

    num_first_tokens: int
    mean_ttft_s: float
    num_gaps: int
    mean_itl_s: float
    prefilled_tokens: int
    busy_s: float
    prefill_was_limit: bool
    running_was_limit: bool


@dataclass(frozen=True, slots=True)
class Windows:
    """prefill_tokens, running: a worker of the phase. prefill_rate: tokens/s of the whole cluster; 0: not known yet."""

    prefill_tokens: float = FIRST_PREFILL_TOKENS
    running: float = MAX_RUNNING
    prefill_rate: float = 0.0


def adjust(windows: Windows, seen: Interval, targets: Targets, num_running: int) -> Windows:
    """num_running: sequences a decode worker has now; a window that never was the limit starts to shrink from there."""
    prefill, running, rate = windows.prefill_tokens, windows.running, windows.prefill_rate
    if seen.num_first_tokens >= MIN_SAMPLES:
        if seen.mean_ttft_s > targets.ttft_s:
            prefill *= DECREASE
        elif seen.prefill_was_limit:
            prefill *= INCREASE
    if seen.num_gaps >= MIN_SAMPLES:
        if seen.mean_itl_s > targets.itl_s:
            running = min(running, max(1, num_running)) * DECREASE
        elif seen.running_was_limit:
            running *= INCREASE
    if seen.prefilled_tokens and seen.busy_s > 0:
        measured = seen.prefilled_tokens / seen.busy_s
        rate = measured if rate == 0 else rate + RATE_SMOOTHING * (measured - rate)
    return Windows(
        min(MAX_PREFILL_TOKENS, max(MIN_PREFILL_TOKENS, prefill)), min(MAX_RUNNING, max(MIN_RUNNING, running)), rate
    )


@dataclass(frozen=True, slots=True)
class AtWorkers:
    """What is with the workers now. prefill_tokens, num_prefilling: without a first token. num_running: all."""

    prefill_tokens: int
    num_prefilling: int
    num_running: int
    num_prefill_workers: int
    num_decode_workers: int


def prefill_has_room(windows: Windows, at: AtWorkers, num_tokens: int, *, contended: bool) -> bool:
    """Whether a prompt of so many tokens may go. One a worker always may; a second where only one tenant is about: it
    keeps the worker busy while the next one is on its way, and no other tenant waits behind it. contended: there is
    another tenant, who would wait behind a whole target's worth of prompts; so the window is at its narrowest.
    """
    workers = max(1, at.num_prefill_workers)
    if at.num_prefilling < workers * (1 if contended else 2):
        return True
    window = MIN_PREFILL_TOKENS if contended else windows.prefill_tokens
    return at.prefill_tokens + num_tokens <= window * workers


def running_has_room(windows: Windows, at: AtWorkers) -> bool:
    return at.num_running < windows.running * max(1, at.num_decode_workers)


@dataclass(frozen=True, slots=True)
class Backlog:
    """As a newcomer of one tenant finds it: tokens that wait of its own, of all, and the weights of who waits."""

    own_tokens: int
    all_tokens: int
    own_weight: float
    other_weight: float


def tokens_ahead(backlog: Backlog) -> float:
    """Prompt tokens that are taken before the newcomer: its own, and what the others' weights earn meanwhile."""
    others = max(0, backlog.all_tokens - backlog.own_tokens)
    return backlog.own_tokens + min(others, backlog.own_tokens * backlog.other_weight / backlog.own_weight)


def predicted_ttft_s(windows: Windows, at: AtWorkers, backlog: Backlog, num_tokens: int) -> float:
    """0 where no rate was measured yet: nobody is refused for what is not known."""
    if windows.prefill_rate <= 0:
        return 0.0
    return (at.prefill_tokens + tokens_ahead(backlog) + num_tokens) / windows.prefill_rate


def fair_limit(limit: int, used_by_all: int, weight: float) -> int:
    """How many places of a bounded room one tenant may hold: as many as are free, times its weight, at least one.

    With dynamic thresholds (Choudhury & Hahne 1998) a flood never takes the last places, and who is alone gets half.
    """
    return max(1, math.floor((limit - used_by_all) * max(weight, 1.0)))


def retry_after_s(windows: Windows, tokens: float) -> float:
    """When so many prompt tokens will have been computed; from 1 s to 60 s."""
    return min(60.0, max(1.0, tokens / windows.prefill_rate if windows.prefill_rate > 0 else 1.0))
