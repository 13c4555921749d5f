"""The writing side of one plain TCP connection: puts go out in order, and end when they are acknowledged, in order."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol

from kv_transfer.transport.base import LostHandler, PutDone, Region, TransportError, TransportFault
from kv_transfer.transport.sockets_wire import ACK, ACK_OK, HEADER, MAGIC, TURN_BYTES

# Closing sends a reset: nothing that the kernel still holds goes out after it.
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Driver(Protocol):
    """The transport's thread."""

    def submit(self, command: Callable[[], None]) -> bool: ...

    def refresh(self, connection: OutboundConnection) -> None: ...


@dataclass(slots=True)
class _Put:
    number: int
    deadline: float
    done: PutDone


class OutboundConnection:
    """Implements Endpoint. Everything but put() and close() happens in the transport's thread.

    deadline: of the oldest put, monotonic seconds. over: the socket is to be closed.
    """

    def __init__(
        self, driver: Driver, connection: socket.socket, token: bytes, num_bytes: int, on_lost: LostHandler
    ) -> None:
        self.socket = connection
        self.over = False
        self._driver = driver
        self._num_bytes = num_bytes
        self._on_lost = on_lost
        self._failure: TransportError | None = None
        self._next_put = 0
        self._puts: deque[_Put] = deque()
        self._outgoing: deque[memoryview] = deque([memoryview(MAGIC + token)])
        self._acks = bytearray()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.lanes: tuple[str, ...] = (f"sockets/{connection.getsockname()[0]}",)

    @property
    def deadline(self) -> float | None:
        return min((put.deadline for put in self._puts), default=None)

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing)

    def put(
        self, source: Region, source_offset: int, target_offset: int, num_bytes: int, timeout_s: float, done: PutDone
    ) -> None:
        deadline = time.monotonic() + timeout_s

        def post() -> None:
            self._post(source, source_offset, target_offset, num_bytes, deadline, done)

        if not self._driver.submit(post):
            done(_closed())

    def close(self) -> Future[None]:
        future: Future[None] = Future()

        def close() -> None:
            self.end(_closed())
            self._driver.refresh(self)
            future.set_result(None)

        if not self._driver.submit(close):
            future.set_result(None)
        return future

    # The rest runs in the transport's thread.

    def turn(self) -> None:
        """Write and read what can be without waiting."""
        try:
            self._write(TURN_BYTES)
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(_lost(error))
        try:
            while not self.over:
                if not (data := self.socket.recv(1 << 16)):
                    self.fail(_lost(None))
                    return
                self._on_acks(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(_lost(error))

    def fail(self, error: TransportError) -> None:
        """The connection has failed by itself."""
        if not self.over:
            self.end(error)
            self._on_lost(error)

    def end(self, error: TransportError) -> None:
        """Nothing goes out any more; puts under way end with `error`. Idempotent."""
        if self.over:
            return
        self.over, self._failure = True, error
        self._outgoing.clear()
        puts, self._puts = self._puts, deque()
        for put in puts:
            put.done(error)

    def _post(
        self, source: Region, source_offset: int, target: int, num_bytes: int, deadline: float, done: PutDone
    ) -> None:
        if self._failure is not None:
            done(self._failure)
            return
        fits_source = 0 <= source_offset <= source_offset + num_bytes <= source.view.nbytes
        if not (fits_source and 0 <= target <= target + num_bytes <= self._num_bytes):
            message = f"put of {num_bytes} bytes from {source_offset} to {target}: the region has {self._num_bytes}"
            done(TransportError(TransportFault.OUT_OF_BOUNDS, message))
            return
        self._puts.append(_Put(self._next_put, deadline, done))
        self._outgoing.append(memoryview(HEADER.pack(self._next_put, target, num_bytes)))
        if num_bytes:
            self._outgoing.append(memoryview(source.view.data)[source_offset : source_offset + num_bytes])
        self._next_put += 1
        self._driver.refresh(self)

    def _write(self, budget: int) -> None:
        while self._outgoing and budget > 0 and not self.over:
            # Header and payload in one call.
            sent = self.socket.sendmsg([self._outgoing[0], *([self._outgoing[1]] if len(self._outgoing) > 1 else [])])
            budget -= sent
            while sent:
                first = self._outgoing[0]
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                    break
                sent -= len(first)
                self._outgoing.popleft()

    def _on_acks(self, data: bytes) -> None:
        self._acks += data
        while len(self._acks) >= ACK.size and not self.over:
            number, status = ACK.unpack_from(self._acks)
            del self._acks[: ACK.size]
            if not self._puts or number != self._puts[0].number or status != ACK_OK:
                self.fail(TransportError(TransportFault.PEER_LOST, f"the peer answered put {number} with {status}"))
                return
            self._puts.popleft().done(None)


def _closed() -> TransportError:
    return TransportError(TransportFault.CLOSED, "the sockets connection is closed")


def _lost(error: OSError | None) -> TransportError:
    why = "it closed the connection" if error is None else error.strerror or str(error)
    return TransportError(TransportFault.PEER_LOST, f"sockets lost the peer: {why}")
