"""Folders on this machine: Baton's home for models, and a cluster's run directory."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from common.errors import StartupError
from deploy.restart_policy import STARTUP_ERROR_EXIT

RUN_PREFIX: Final = "baton-run-"
# A run directory whose supervisor is gone is kept so long, for its logs.
KEEP_DEAD_RUN_S: Final = 24 * 3600.0


def baton_home(environ: Mapping[str, str] | None = None) -> Path:
    """$XDG_CACHE_HOME/baton, or ~/.cache/baton. Not created."""
    env = os.environ if environ is None else environ
    cache = env.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "baton"


@contextmanager
def run_directory() -> Iterator[Path]:
    """A private directory for sockets, settings and logs. Removed at the end, unless that is an exception which only
    the logs explain: any but a StartupError that names a fault of settings, model or machine."""
    base = Path(tempfile.gettempdir())
    remove_dead_runs(base, now=time.time())
    path = Path(tempfile.mkdtemp(prefix=f"{RUN_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield path
    except StartupError as error:
        if error.exit_code == STARTUP_ERROR_EXIT:
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def remove_dead_runs(base: Path, now: float) -> None:
    """Remove what supervisors that were killed left behind, once it is old. now: seconds since the epoch."""
    for path in base.glob(f"{RUN_PREFIX}*-*"):
        pid = path.name.removeprefix(RUN_PREFIX).partition("-")[0]
        try:
            stat = path.lstat()
        except OSError:
            continue
        if stat.st_uid != os.getuid() or now - stat.st_mtime < KEEP_DEAD_RUN_S:
            continue
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
