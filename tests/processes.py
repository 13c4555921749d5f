"""Looking at processes from tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

DEADLINE_S = 15.0


def gone(pid: int, deadline_s: float = DEADLINE_S) -> bool:
    """Whether the process ends (a zombie counts as ended) before the deadline."""
    return becomes_true(lambda: not alive(pid), deadline_s)


def all_gone(pids: Iterable[int], deadline_s: float = DEADLINE_S) -> bool:
    pids = list(pids)
    return becomes_true(lambda: not any(map(alive, pids)), deadline_s)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int, word: str) -> list[int]:
    """Pids of the living descendants that have a word of their command line ending in `word`."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie too
            if any(part.endswith(word) for part in " ".join(process.cmdline()).split()):
                found.append(process.pid)
    return found


def becomes_true(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> bool:
    """Polls until `condition()` holds, or the deadline passes."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
