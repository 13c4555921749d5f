"""Keeps one child process running: starts it tied to our life, restarts it by policy, stops it within a bound. One that
falls silent, stopped or stuck, is killed, and so restarted.

NEW ── start ──► RUNNING ── died ──► WAITING ── delay over ──► RUNNING
 │                 │  └─ drained, or policy gives up ──► ENDED   │
 └──── stop ───────┴────────► STOPPING ── gone ──► ENDED ◄───────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from common import die_with_parent
from common.errors import StartupError
from common.telemetry import get_logger
from deploy.child_log import startup_error, tail
from deploy.restart_policy import STARTUP_ERROR_EXIT, RestartPolicy, after_death, describe_exit
from deploy.watchdog import Watchdog

LOG_LINES_SHOWN: Final = 12

log = get_logger(__name__)


class ChildState(Enum):
    NEW = "new"
    RUNNING = "running"
    WAITING = "waiting"
    STOPPING = "stopping"
    ENDED = "ended"


LEGAL_MOVES: Final[dict[ChildState, frozenset[ChildState]]] = {
    ChildState.NEW: frozenset({ChildState.RUNNING, ChildState.STOPPING}),
    ChildState.RUNNING: frozenset({ChildState.WAITING, ChildState.STOPPING, ChildState.ENDED}),
    ChildState.WAITING: frozenset({ChildState.RUNNING, ChildState.STOPPING}),
    ChildState.STOPPING: frozenset({ChildState.ENDED}),
    ChildState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """argv[0] is an absolute path. log_path receives stdout and stderr, appended."""

    name: str
    argv: Sequence[str]
    log_path: Path


class GaveUpError(StartupError):
    """A child can't be kept running. log_tail: the last lines of its log, where the message does not say it all."""

    def __init__(self, message: str, *, exit_code: int, log_tail: Sequence[str] = ()) -> None:
        super().__init__(message, exit_code=exit_code)
        self.log_tail = log_tail


class Child:
    """Owns the process and the task that watches it. All methods belong to one event loop, in the main thread.

    on_give_up: called once, when the policy does; the child is ENDED then.
    """

    def __init__(self, spec: ChildSpec, policy: RestartPolicy, on_give_up: Callable[[GaveUpError], None]) -> None:
        self.spec = spec
        self.state = ChildState.NEW
        self._policy = policy
        self._on_give_up = on_give_up
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()
        self._watchdog: Watchdog | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process else None

    def start(self, env: dict[str, str]) -> None:
        """Start and keep running, with this environment."""
        self._spawn(env)
        self._task = asyncio.create_task(self._keep_running(env), name=f"supervise {self.spec.name}")

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole session after grace_s. Returns when it is gone. May be called twice."""
        if self._task is None:
            return
        self._stop_asked.set()
        if self.state in (ChildState.RUNNING, ChildState.WAITING):
            self._move(ChildState.STOPPING)
            if self._process:
                self._process.terminate()
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        if not done:
            log.warning("killed: it did not stop in time", child=self.spec.name, grace_s=grace_s)
            self.kill()
        await self._task

    def kill(self) -> None:
        """SIGKILL to the child's session, now."""
        self._stop_asked.set()
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _spawn(self, env: dict[str, str]) -> None:
        watchdog = Watchdog(self._policy.watchdog_s, self._on_silence)
        try:
            self._start_process({**env, **watchdog.environment})
        except BaseException:
            watchdog.close()
            raise
        self._watchdog = watchdog
        self._move(ChildState.RUNNING)

    def _on_silence(self) -> None:
        log.warning("killed: it shows no sign of life", child=self.spec.name, silent_s=self._policy.watchdog_s)
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start_process(self, env: dict[str, str]) -> None:
        with self.spec.log_path.open("ab") as log_file:
            self._process = subprocess.Popen(
                die_with_parent.command(self.spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=env,
                start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
            )

    async def _keep_running(self, env: dict[str, str]) -> None:
        clock = asyncio.get_running_loop().time
        fast_deaths = 0
        started = clock()
        while self._process:
            exit_code = await _ended(self._process)
            self._process = None
            if self._watchdog:
                self._watchdog.close()
            if self._stop_asked.is_set():
                break
            verdict = after_death(self._policy, exit_code=exit_code, ran_s=clock() - started, fast_deaths=fast_deaths)
            fast_deaths = verdict.fast_deaths
            if verdict.is_over:
                log.warning("it was told to stop: not started again", child=self.spec.name)
                self._move(ChildState.ENDED)
                return
            if verdict.delay_s is None:
                self._move(ChildState.ENDED)
                self._on_give_up(self._last_words(exit_code, fast_deaths))
                return
            self._move(ChildState.WAITING)
            how = describe_exit(exit_code)
            log.warning(
                "died; restarting", child=self.spec.name, exit=how, in_s=verdict.delay_s, log=str(self.spec.log_path)
            )
            if not await self._spawn_again(env, verdict.delay_s):
                break
            started = clock()
        if self.state is not ChildState.STOPPING:
            self._move(ChildState.STOPPING)
        self._move(ChildState.ENDED)

    async def _spawn_again(self, env: dict[str, str], delay_s: float) -> bool:
        """Until the machine lets us (memory, process table, disk). False: a stop was asked for meanwhile."""
        while not await _is_set_within(self._stop_asked, delay_s):
            try:
                self._spawn(env)
                return True
            except OSError as error:
                delay_s = self._policy.longest_delay_s
                log.warning("can't be started; trying again", child=self.spec.name, reason=str(error), in_s=delay_s)
        return False

    def _last_words(self, exit_code: int, fast_deaths: int) -> GaveUpError:
        reason = startup_error(self.spec.log_path) if exit_code == STARTUP_ERROR_EXIT else ""
        if reason:
            return GaveUpError(f"{self.spec.name}: {reason}", exit_code=STARTUP_ERROR_EXIT)
        times = f" {fast_deaths} times in a row, the last time" if fast_deaths > 1 else ""
        message = f"{self.spec.name} died{times} with {describe_exit(exit_code)}: see {self.spec.log_path}"
        return GaveUpError(message, exit_code=1, log_tail=tail(self.spec.log_path, LOG_LINES_SHOWN))

    def _move(self, to: ChildState) -> None:
        if to not in LEGAL_MOVES[self.state]:
            raise RuntimeError(f"{self.spec.name}: no move from {self.state.value} to {to.value}")
        self.state = to


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end, kill what is left of its session, reap it. Returns the exit code."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # before wait(): the number is not ours any more after it
    return process.wait()


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
