"""The thread that owns one UCX context and worker: every libucp call of a transport is made in it.

    any thread ── submit(command) ──► queue ──┐
                                              ▼
                  ┌─► run commands ─► progress ─► reap ─► arm ─► poll(UCX event fd, wake fd, next deadline) ─┐
                  └──────────────────────────────────────────────────────────────────────────────────────────┘

Posting may copy inline (CMA) and so needs a thread; lanes over tcp complete only while both sides progress. An idle
worker sleeps in poll: no CPU.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, TypeVar

from common.telemetry import get_logger
from kv_transfer.transport import ucx_abi as abi
from kv_transfer.transport.base import TransportError, TransportFault

T = TypeVar("T")
CALL_TIMEOUT_S: Final = 30.0
# Pause where the worker can't be armed: never seen, but a spin would burn a core.
ARM_RETRY_S: Final = 0.01

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """library: path of libucp; empty: the system's, then the wheel's. net_devices, tls: UCX_NET_DEVICES and UCX_TLS;
    empty: as the environment says, else UCX's choice."""

    library: str = ""
    net_devices: str = ""
    tls: str = ""


def net_devices_for(configured: str, host: str) -> str:
    """The devices to use where a service listens on `host`: loopback only for a loopback address, so that no other
    interface is opened for it."""
    return configured or ("lo" if is_loopback(host) else "")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class UcxWorker:
    """reap(now): called in the thread after progress; handles what completed, returns the next deadline (monotonic
    seconds) or None. on_stop(): called last in the thread, before context and worker are destroyed.

    lib, context, worker: for use in the thread only, between start() and stop().
    """

    def __init__(
        self, settings: UcxSettings, *, reap: Callable[[float], float | None], on_stop: Callable[[], None]
    ) -> None:
        self.lib: Any = None
        self.context: Any = None
        self.worker: Any = None
        self.library_path = ""
        self._settings = settings
        self._reap = reap
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._running = False
        self._stopping = False
        self._event_fd = -1
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises TransportError (UNAVAILABLE); then nothing is left running."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="ucx", daemon=True)
        self._thread.start()
        try:
            ready.result(CALL_TIMEOUT_S)
        except BaseException:
            self._thread.join(CALL_TIMEOUT_S)
            raise

    def submit(self, command: Callable[[], None]) -> bool:
        """Run `command` in the thread. False: the thread has ended, and `command` will not run."""
        with self._lock:
            if not self._running:
                return False
            self._commands.append(command)
            if len(self._commands) == 1:
                os.eventfd_write(self._wake_fd, 1)
        return True

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the thread and wait. Raises what it raises, or TransportError (CLOSED)."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if not self.submit(run):
            raise TransportError(TransportFault.CLOSED, "the UCX transport is closed")
        return future.result(CALL_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the thread; commands submitted before have run. Idempotent."""

        def stop() -> None:
            self._stopping = True

        self.submit(stop)
        if self._thread is not None:
            self._thread.join(CALL_TIMEOUT_S)

    def progress(self) -> None:
        while self.lib.ucp_worker_progress(self.worker):
            pass

    # The rest runs in the thread.

    def _main(self, ready: Future[None]) -> None:
        try:
            self._open()
        except BaseException as error:
            self._destroy()
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._on_stop()
            with self._lock:
                self._running = False
            self._run_commands()
            self._destroy()

    def _turn(self) -> None:
        self._run_commands()
        self.progress()
        deadline = self._reap(time.monotonic())
        if self._stopping:
            return
        status = self.lib.ucp_worker_arm(self.worker)
        if status == abi.STATUS_BUSY:
            return
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if status < abi.STATUS_OK:
            wait_s = ARM_RETRY_S
        self._poller.poll(None if wait_s is None else wait_s * 1e3)

    def _run_commands(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, deque()
            if commands:
                os.eventfd_read(self._wake_fd)
        for command in commands:
            try:
                command()
            except Exception:
                log.exception("a command of the UCX thread failed")

    def _open(self) -> None:
        self.lib, self.library_path = abi.load_libucp(self._settings.library)
        # Else it warns of every UCX_ variable that its own version doesn't know, on stdout.
        self.lib.ucs_global_opts_set_value(b"WARN_UNUSED_ENV_VARS", b"n")
        self._create_context()
        handle = abi.ffi.new("ucp_worker_h *")
        params = abi.ffi.new(
            "ucp_worker_params_t *",
            {"field_mask": abi.WORKER_FIELD_THREAD_MODE, "thread_mode": abi.THREAD_MODE_SINGLE},
        )
        abi.check(self.lib, self.lib.ucp_worker_create(self.context, params, handle), "worker creation")
        self.worker = handle[0]
        event_fd = abi.ffi.new("int *")
        abi.check(self.lib, self.lib.ucp_worker_get_efd(self.worker, event_fd), "event fd")
        self._event_fd = event_fd[0]
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._event_fd, select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)
        self._running = True

    def _create_context(self) -> None:
        lib, ffi = self.lib, abi.ffi
        config = ffi.new("ucp_config_h *")
        abi.check(lib, lib.ucp_config_read(ffi.NULL, ffi.NULL, config), "configuration")
        try:
            # With error handling PEER, UCX gives up shared-memory lanes (CMA) unless rendezvous is off.
            changes = {"RNDV_THRESH": "inf", "NET_DEVICES": self._settings.net_devices, "TLS": self._settings.tls}
            for name, value in changes.items():
                if value:
                    status = lib.ucp_config_modify(config[0], name.encode(), value.encode())
                    abi.check(lib, status, f"setting {name}={value}")
            params = ffi.new(
                "ucp_params_t *",
                {"field_mask": abi.CONTEXT_FIELD_FEATURES, "features": abi.FEATURE_RMA | abi.FEATURE_WAKEUP},
            )
            handle = ffi.new("ucp_context_h *")
            what = f"start with NET_DEVICES={self._settings.net_devices or 'all'} (check the setting ucx_net_devices)"
            abi.check(lib, lib.ucp_init_version(*abi.MIN_VERSION, params, config[0], handle), what)
            self.context = handle[0]
        finally:
            lib.ucp_config_release(config[0])

    def _destroy(self) -> None:
        if self.worker is not None:
            self.lib.ucp_worker_destroy(self.worker)
        if self.context is not None:
            self.lib.ucp_cleanup(self.context)
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
        self.worker = self.context = None
        self._wake_fd = -1
