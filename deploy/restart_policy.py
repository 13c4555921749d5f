"""What a supervisor does about a part that ended: start it again, when, or give up. Pure.

A part that ends with 0 was told to, by SIGTERM or `baton drain`: it stays down. One that ran for a while and then dies
is started again at once; one that keeps dying young waits longer each time, and after some such deaths in a row it will
not come right by itself.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

# What the CLI exits with when the settings, the model or the machine are at fault: trying again changes nothing.
STARTUP_ERROR_EXIT: Final = 2


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A death within young_s of the start is fast; more than max_fast_deaths of them in a row end the cluster. A part
    that was alive and is silent for watchdog_s, stopped or stuck, is killed; 0: never."""

    first_delay_s: float = 0.2
    longest_delay_s: float = 10.0
    young_s: float = 30.0
    max_fast_deaths: int = 4
    watchdog_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """delay_s: until the next start; None: none follows. fast_deaths: to be passed in at the next death. is_over: it
    was told to stop, and is missed by nobody."""

    delay_s: float | None
    fast_deaths: int
    is_over: bool = False


def after_death(policy: RestartPolicy, *, exit_code: int, ran_s: float, fast_deaths: int) -> Verdict:
    """exit_code: as subprocess gives it (minus the signal's number). fast_deaths: those in a row before this one."""
    if exit_code == 0:
        return Verdict(None, 0, is_over=True)
    fast_deaths = fast_deaths + 1 if ran_s < policy.young_s else 0
    if exit_code == STARTUP_ERROR_EXIT or fast_deaths > policy.max_fast_deaths:
        return Verdict(None, fast_deaths)
    delay_s = policy.first_delay_s * 2 ** max(0, fast_deaths - 1)
    return Verdict(min(delay_s, policy.longest_delay_s), fast_deaths)


def describe_exit(exit_code: int) -> str:
    """ "exit code 1", "killed by SIGKILL"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
