"""Start a program that the kernel kills when the process that started it dies, kill -9 included (Linux prctl(2)).

    parent ── python -I -S die_with_parent.py PARENT_PID program args…
                 prctl(PR_SET_PDEATHSIG, SIGKILL);  parent gone already? exit;  execv(program)

The setting outlives execv, so any program will do. A wrapper rather than preexec_fn: that one is unsafe beside threads.
The kernel means the parent *thread*: start children from a thread that lives as long as they shall.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def command(program: Sequence[str | Path]) -> list[str]:
    """The argv that runs `program` (an absolute path and its arguments) tied to this process's life."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *map(str, program)]


def _main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the prctl call
        raise SystemExit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    _main()
