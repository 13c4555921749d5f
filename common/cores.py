"""How a process shares the machine's cores with others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from common.telemetry import get_logger

_log = get_logger(__name__)


def give_way(nice: int) -> None:
    """Leave more of the cores to whoever else wants them; nice: 0 to 19, as nice(2) has it. For threads yet to start.

    Where the kernel schedules each session as a group (autogroup, sched(7)), only the group's own nice counts between
    two of them: both are set. What can't be set is logged; it costs speed, not correctness.
    """
    if nice == 0:
        return
    try:
        os.nice(nice)
    except OSError as error:
        _log.warning("priority can't be set", nice=nice, reason=str(error))
    with suppress(OSError):  # no such file: no autogroups here
        Path("/proc/self/autogroup").write_text(str(nice))
