"""`baton prefill` or `baton decode` with faults to order; `python -m tests.fault.faulty_worker ROLE …`.

SIGUSR1           every engine step from now on fails, as when a device is lost
KILLER in a step  the process dies as by a segmentation fault: a request that kills whoever computes it
"""

from __future__ import annotations

import os
import signal

from common.engine.model_runner import ModelRunner
from deploy import cli

# Token ids that follow each other in the prompt of a request that kills.
KILLER = (291, 7, 292, 7, 293)


def _install() -> None:
    is_broken = False

    def break_engine(*_: object) -> None:
        nonlocal is_broken
        is_broken = True

    execute = ModelRunner.execute

    def faulty_execute(self, scheduled):
        if is_broken:
            raise RuntimeError("the device is lost")
        for each in scheduled:
            ids = tuple(each.token_ids)
            if any(ids[i : i + len(KILLER)] == KILLER for i in range(len(ids))):
                os.kill(os.getpid(), signal.SIGSEGV)
        return execute(self, scheduled)

    ModelRunner.execute = faulty_execute
    signal.signal(signal.SIGUSR1, break_engine)


if __name__ == "__main__":
    _install()
    cli.main()
