"""Which request might have killed its workers, and what becomes of it. Pure.

A worker that dies takes many requests with it, and any of them may be the cause. One that gets on after a death has
shown that it was not:

    failure ── PROVEN_TOKENS since the last one? ── yes ──► a clean record
        │
        ├── died, not just fell silent, on trial ─► GUILTY: its second (or third) worker, and no other suspect was about
        ├── MAX_ATTEMPTS or MAX_SILENCES in a row ► GIVE_UP
        ├── died before a token, or twice ───────► TRIAL: again, but no two suspects at a time
        └── else ────────────────────────────────► AGAIN, at once

Streams that flow when their worker dies so go on at once, and the few prompts that it was just computing go on one by
one: a prompt that kills takes two workers, and no peer with it (docs/decisions/0055-poison-on-trial.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

# Attempts in a row that may fail without progress between them.
MAX_ATTEMPTS: Final = 3
# Attempts in a row whose worker fell silent. Most that do are only slow, on a busy machine, and come back: this bound
# ends only what would wedge one worker after the other.
MAX_SILENCES: Final = 8
# Output tokens of one attempt that show that the request does no harm. A trial lasts no longer.
PROVEN_TOKENS: Final = 8


class Verdict(Enum):
    AGAIN = "again"
    TRIAL = "trial"
    GUILTY = "guilty"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Record:
    """Since the request last got on: attempts that failed, those whose worker fell silent (no failures), those whose
    worker was lost either way, and of the ones that died those that had brought no token yet. died_on_trial: the last
    failure."""

    num_failures: int = 0
    num_silences: int = 0
    num_deaths: int = 0
    num_early_deaths: int = 0
    died_on_trial: bool = False


def after_failure(record: Record, *, num_tokens: int, died: bool, silent: bool = False, on_trial: bool) -> Record:
    """num_tokens: output of the attempt that failed. died: its worker was lost, and did not say what went wrong.
    silent: perhaps it was only slow, on a busy machine. That convicts nobody.
    """
    if num_tokens >= PROVEN_TOKENS:
        record, on_trial = Record(), False
    return Record(
        num_failures=record.num_failures + (not silent),
        num_silences=record.num_silences + silent,
        num_deaths=record.num_deaths + died,
        num_early_deaths=record.num_early_deaths + (died and not silent and not num_tokens),
        died_on_trial=died and on_trial and not silent,
    )


def verdict(record: Record) -> Verdict:
    if record.died_on_trial:
        return Verdict.GUILTY
    if record.num_failures >= MAX_ATTEMPTS or record.num_silences >= MAX_SILENCES:
        return Verdict.GIVE_UP
    return Verdict.TRIAL if record.num_early_deaths or record.num_deaths > 1 else Verdict.AGAIN
