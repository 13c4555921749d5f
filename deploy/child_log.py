"""Reading a part's log file: its last lines, what it is busy with, why it could not start."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

TAIL_BYTES: Final = 16 << 10
# "2026-01-01T00:00:00Z [info     ] event words   [logger.name] key=value"
_CONSOLE_EVENT: Final = re.compile(r"\[(?:debug|info|warning|error)\s*\] (?P<event>.*?)\s+\[[\w.]+\]")
_ERROR_PREFIX: Final = "baton: "


def tail(path: Path, num_lines: int) -> list[str]:
    """The last lines, reading TAIL_BYTES at most; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []


def last_event(path: Path) -> str:
    """The event of the last log line that has one, in either format; "" if none has."""
    return next(filter(None, map(event_of, reversed(tail(path, 20)))), "")


def event_of(line: str) -> str:
    """The event of one log line; "" for any other line."""
    if line.startswith("{"):
        try:
            return str(json.loads(line).get("event", ""))
        except ValueError:
            return ""
    match = _CONSOLE_EVENT.search(line)
    return match["event"] if match else ""


def startup_error(path: Path) -> str:
    """The message of the last "baton: …" line, by which a command says why it can't start; "" if there is none."""
    lines = [line for line in tail(path, 20) if line.startswith(_ERROR_PREFIX)]
    return lines[-1].removeprefix(_ERROR_PREFIX) if lines else ""
