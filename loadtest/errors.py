"""The one error that the user of `baton bench` may see."""

from __future__ import annotations

from common.errors import StartupError


class BenchError(StartupError):
    """One line: what, where, what to do. The command line prints it and exits with `exit_code`."""
