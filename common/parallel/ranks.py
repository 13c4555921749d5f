"""Rank 0's hold on the other ranks' processes: start them, tell them each step, notice a death, end them."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

import msgspec

from common.die_with_parent import command as die_with_parent
from common.errors import StartupError
from common.parallel.protocol import READY, RankPlan

# Loading a large model's shard from a slow disk.
READY_DEADLINE_S: Final = 1800.0
CLOSE_DEADLINE_S: Final = 2.0
_POLL_S: Final = 0.2


class Ranks:
    """Processes of ranks 1 … size - 1. They die with this process, whatever ends it.

    Start it from a thread that lives as long as they shall (common/die_with_parent.py). `send` is for one thread;
    `failure` and `close` for any.
    """

    def __init__(self, plan: RankPlan) -> None:
        """plan: rank 0's, with rendezvous left empty: a folder of this object's own. They begin to load at once."""
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self.rendezvous = Path(self._folder.name) / "meet"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._failure: str | None = None
        self._closing = threading.Lock()
        try:
            for rank in range(1, plan.size):
                self._start(msgspec.structs.replace(plan, rank=rank, rendezvous=str(self.rendezvous)))
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str | None:
        """Why the group can't compute any more, as one line; None while it can."""
        deaths = (_death(rank, process) for rank, process in enumerate(self._processes, 1))
        # A death says more than the step that it made fail.
        return next((line for line in deaths if line is not None), self._failure)

    def fail(self, reason: str) -> None:
        """The ranks are out of step with this one: nothing they compute can be trusted."""
        self._failure = self._failure or reason

    def wait_ready(self) -> None:
        """Until all have loaded. Raises StartupError where one dies, or READY_DEADLINE_S pass."""
        missing = list(self._connections)
        deadline = time.monotonic() + READY_DEADLINE_S
        while missing:
            for connection in wait(missing, _POLL_S):
                with suppress(EOFError, OSError):
                    if connection.recv_bytes() == READY:  # type: ignore[union-attr]
                        missing.remove(connection)  # type: ignore[arg-type]
            if (failure := self.failure) is not None:
                raise StartupError(failure)
            if time.monotonic() > deadline:
                raise StartupError(f"a tensor-parallel rank has not loaded its weights in {READY_DEADLINE_S:.0f} s")

    def send(self, frame: bytes) -> None:
        """To each rank. Raises RuntimeError where one is gone."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        try:
            for connection in self._connections:
                connection.send_bytes(frame)
        except OSError:
            raise RuntimeError(self.failure or "a tensor-parallel rank has closed its socket") from None

    def close(self) -> None:
        """End them: they are asked, then killed. Idempotent."""
        with self._closing:
            for connection in self._connections:
                connection.close()
            deadline = time.monotonic() + CLOSE_DEADLINE_S
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._connections, self._processes = [], []
            self._folder.cleanup()

    def _start(self, plan: RankPlan) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._connections.append(Connection(ours.detach()))
            argv = die_with_parent([sys.executable, "-m", "common.parallel.rank_process", str(theirs.fileno())])
            process = subprocess.Popen(argv, pass_fds=(theirs.fileno(), plan.kv_fd), stdin=subprocess.DEVNULL)
        self._processes.append(process)
        with suppress(BrokenPipeError):  # it is dead already: wait_ready says so
            self._connections[-1].send_bytes(msgspec.msgpack.encode(plan))


def _death(rank: int, process: subprocess.Popen[bytes]) -> str | None:
    code = process.poll()
    if code is None:
        return None
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}, its last log line says why"
    return f"tensor-parallel rank {rank} (pid {process.pid}) {how}"
