"""Plain TCP sockets, for hosts without UCX or RDMA: the same contract as UCX's, one thread, no library.

    any thread ── submit(command) ──► queue ──┐
                                              ▼
         ┌─► run commands ─► turns of ready sockets ─► deadlines ─► select(sockets, wake fd, next deadline) ─┐
         └───────────────────────────────────────────────────────────────────────────────────────────────────┘

A put is acknowledged when its last byte is in the region: remotely complete. The region can be written only by who
shows the token that its descriptor carries, and only inside its bounds.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from common.telemetry import get_logger
from kv_transfer.transport.base import Endpoint, LostHandler, TransportError, TransportFault
from kv_transfer.transport.sockets_endpoint import OutboundConnection
from kv_transfer.transport.sockets_wire import BUFFER_BYTES, TOKEN_BYTES, InboundConnection, tune

# A stranger's connection costs a descriptor for this long, and there are at most so many connections.
HELLO_TIMEOUT_S: Final = 5.0
MAX_INBOUND: Final = 1024
STOP_TIMEOUT_S: Final = 10.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SocketsSettings:
    """host: address to listen on. advertise_host: what peers dial; empty: host. A free port is chosen."""

    host: str = "127.0.0.1"
    advertise_host: str = ""


class SocketsDescriptor(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    num_bytes: int
    token: bytes


@dataclass(frozen=True, slots=True)
class _Address:
    """As getaddrinfo gives it."""

    family: int
    sockaddr: Any


class SocketsRegion:
    """Implements Region. Zeroed; one listener a region, so that a token opens one region and no other."""

    def __init__(self, settings: SocketsSettings, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> None:
        own = np.frombuffer(mmap.mmap(-1, max(1, num_bytes)), np.uint8)[:num_bytes] if memory is None else memory
        self.view: npt.NDArray[np.uint8] = own
        self.token = secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            self.listener = socket.create_server((settings.host, 0), family=family, backlog=128)
        except OSError as error:
            message = f"can't listen on {settings.host}: {error.strerror}; check the setting host"
            raise TransportError(TransportFault.UNAVAILABLE, message) from None
        # Inherited by accepted sockets; must be set before the handshake to widen the window.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.listener.setblocking(False)
        self._host = settings.advertise_host or settings.host
        self._port = self.listener.getsockname()[1]

    def descriptor(self) -> bytes:
        return msgspec.msgpack.encode(SocketsDescriptor(self._host, self._port, self.view.nbytes, self.token))


class SocketsTransport:
    """Implements Transport. One thread, whatever the number of connections."""

    name = "sockets"

    def __init__(self, settings: SocketsSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._running = self._stopping = False
        self._wake_fd = -1
        self._thread: threading.Thread | None = None
        self._regions: dict[socket.socket, SocketsRegion] = {}
        self._inbound: dict[socket.socket, InboundConnection] = {}
        self._outbound: dict[socket.socket, OutboundConnection] = {}

    @property
    def devices(self) -> tuple[str, ...]:
        return (f"sockets/{self._settings.host}",)

    def start(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._running = True
        self._thread = threading.Thread(target=self._main, name="kv-sockets", daemon=True)
        self._thread.start()

    def allocate(self, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> SocketsRegion:
        region = SocketsRegion(self._settings, num_bytes, memory)

        def add() -> None:
            self._regions[region.listener] = region
            self._selector.register(region.listener, selectors.EVENT_READ)

        if not self.submit(add):
            region.listener.close()
            raise _closed()
        return region

    def connect(self, descriptor: bytes, on_lost: LostHandler) -> Future[Endpoint]:
        future: Future[Endpoint] = Future()

        def resolve_and_connect() -> None:
            """Looking a name up may wait: not in the transport's thread."""
            try:
                target, address = _resolve(descriptor)
            except TransportError as error:
                future.set_exception(error)
                return

            def connect() -> None:
                try:
                    future.set_result(self._connect(target, address, on_lost))
                except TransportError as error:
                    future.set_exception(error)

            if not self.submit(connect):
                future.set_exception(_closed())

        future.set_running_or_notify_cancel()
        threading.Thread(target=resolve_and_connect, name="kv-resolve", daemon=True).start()
        return future

    def close(self) -> None:
        def stop() -> None:
            self._stopping = True

        self.submit(stop)
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def submit(self, command: Callable[[], None]) -> bool:
        """Run `command` in the thread. False: it has ended, and `command` will not run."""
        with self._lock:
            if not self._running:
                return False
            self._commands.append(command)
            if len(self._commands) == 1:
                os.eventfd_write(self._wake_fd, 1)
        return True

    # The rest runs in the transport's thread.

    def refresh(self, connection: OutboundConnection) -> None:
        """Its wish to write has changed, or it has ended."""
        if not connection.over:
            self._watch(connection.socket, wants_write=connection.wants_write)
        elif self._outbound.pop(connection.socket, None) is not None:
            self._drop(connection.socket)

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            log.exception("the sockets thread failed")
        finally:
            self._shut()

    def _turn(self) -> None:
        deadline = self._expire(time.monotonic())
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fileobj == self._wake_fd:
                self._run_commands()
            elif isinstance(key.fileobj, socket.socket):
                self._serve(key.fileobj)

    def _run_commands(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, deque()
            if commands:
                os.eventfd_read(self._wake_fd)
        for command in commands:
            try:
                command()
            except Exception:
                log.exception("a command of the sockets thread failed")

    def _serve(self, ready: socket.socket) -> None:
        if (region := self._regions.get(ready)) is not None:
            self._accept(region)
        elif (inbound := self._inbound.get(ready)) is not None:
            if inbound.turn():
                self._watch(ready, wants_write=inbound.wants_write)
            else:
                del self._inbound[ready]
                self._drop(ready)
        elif (outbound := self._outbound.get(ready)) is not None:
            outbound.turn()
            self.refresh(outbound)

    def _accept(self, region: SocketsRegion) -> None:
        try:
            connection, _ = region.listener.accept()
        except OSError:
            return
        if len(self._inbound) >= MAX_INBOUND:
            connection.close()
            return
        tune(connection)
        hello_by = time.monotonic() + HELLO_TIMEOUT_S
        self._inbound[connection] = InboundConnection(connection, region.view, region.token, hello_by)
        self._selector.register(connection, selectors.EVENT_READ)

    def _connect(self, target: SocketsDescriptor, address: _Address, on_lost: LostHandler) -> OutboundConnection:
        try:
            connection = socket.socket(address.family, socket.SOCK_STREAM)
        except OSError as error:
            raise TransportError(TransportFault.UNAVAILABLE, f"no socket: {error.strerror}") from None
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        tune(connection)
        status = connection.connect_ex(address.sockaddr)  # comes up, or fails, while puts wait in its queue
        if status not in (0, errno.EINPROGRESS):
            connection.close()
            message = f"can't reach {target.host}:{target.port}: {os.strerror(status)}"
            raise TransportError(TransportFault.PEER_LOST, message)
        endpoint = OutboundConnection(self, connection, target.token, target.num_bytes, on_lost)
        self._outbound[connection] = endpoint
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        return endpoint

    def _watch(self, connection: socket.socket, *, wants_write: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _expire(self, now: float) -> float | None:
        """End what is overdue; the next deadline."""
        for endpoint in [e for e in self._outbound.values() if e.deadline is not None and e.deadline <= now]:
            endpoint.fail(TransportError(TransportFault.TIMEOUT, "a put was not complete in time: connection closed"))
            self.refresh(endpoint)
        for inbound in [c for c in self._inbound.values() if c.hello_by is not None and c.hello_by <= now]:
            del self._inbound[inbound.socket]
            self._drop(inbound.socket)
        waits = [e.deadline for e in self._outbound.values()] + [c.hello_by for c in self._inbound.values()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _shut(self) -> None:
        for endpoint in list(self._outbound.values()):
            endpoint.end(_closed())
            self.refresh(endpoint)
        with self._lock:
            self._running = False
        self._run_commands()
        for connection in [*self._inbound, *self._regions]:
            self._drop(connection)
        self._selector.close()
        os.close(self._wake_fd)


def _resolve(descriptor: bytes) -> tuple[SocketsDescriptor, _Address]:
    """Raises TransportError (BAD_DESCRIPTOR)."""
    try:
        target = msgspec.msgpack.decode(descriptor, type=SocketsDescriptor)
        family, _, _, _, sockaddr = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
    except (msgspec.DecodeError, msgspec.ValidationError, OSError, IndexError, OverflowError) as error:
        message = f"the peer's sockets descriptor ({len(descriptor)} bytes) leads nowhere: {error}"
        raise TransportError(TransportFault.BAD_DESCRIPTOR, message) from None
    return target, _Address(family, sockaddr)


def _closed() -> TransportError:
    return TransportError(TransportFault.CLOSED, "the sockets transport is closed")
