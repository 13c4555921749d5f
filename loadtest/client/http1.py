"""A small HTTP/1.1 client whose cost per streamed event is one callback, not one task wake-up.

General clients spend 100 µs and more on each streamed chunk; at 10,000 events a second that is the whole core. Here a
socket read goes through the llhttp parser (httptools) straight into the request's sink, time-stamped once a read.
One request a connection at a time; connections are kept alive and reused, newest first. No TLS, no redirects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from loadtest.record import TargetError


class ConnectFailedError(Exception):
    """No connection: refused, unreachable, or out of sockets."""


class DisconnectedError(Exception):
    """The server closed the connection before the response was complete."""


class BadResponseError(Exception):
    """What came back is not HTTP, or its body is not what its sink can read."""


class ResponseSink(Protocol):
    """Takes one response. Calls come from the event loop's read callback and must not block."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Header names are lower case."""
        ...

    def on_body(self, data: bytes, now_s: float) -> None:
        """now_s: perf_counter when the bytes were read. Raises ValueError when they make no sense."""
        ...


class BufferSink:
    """Keeps the whole response, for calls that are not streams."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.body = status, b""

    def on_body(self, data: bytes, now_s: float) -> None:
        self.body += data


@dataclass(frozen=True, slots=True)
class Address:
    """host and port to dial, the Host header, and the path that the URL had (no slash at its end)."""

    host: str
    port: int
    host_header: str
    path: str


def parse_url(url: str) -> Address:
    """Raises TargetError for anything but plain http with a host."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as e:
        raise TargetError(f"--url {url}: {e}") from e
    if parts.scheme != "http" or not parts.hostname:
        raise TargetError(f"--url {url}: expected http://host:port (no TLS) or grpc://host:port")
    return Address(parts.hostname, port, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"))


class ConnectionState(Enum):
    """idle ⇄ busy, and from either to closed; nothing leaves closed."""

    IDLE = "idle"
    BUSY = "busy"
    CLOSED = "closed"


class _Connection(asyncio.Protocol):
    """One socket. The client that made it owns it; `transport` is set by connection_made."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.state = ConnectionState.IDLE
        self.reused = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: ResponseSink | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: dict[bytes, bytes] = {}
        self._now_s = 0.0
        self._until_close = False
        self.got_bytes = False

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self._parser is None:
            # Bytes that nobody asked for: this connection can't be trusted with another request.
            self.close()
            return
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as e:
            self._finish(BadResponseError(str(e.__context__ or e)))
        except httptools.HttpParserError as e:
            self._finish(BadResponseError(f"not HTTP/1.1: {e}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.state = ConnectionState.CLOSED
        if self._until_close:
            self._finish(None)
        else:
            self._finish(DisconnectedError(str(exc) if exc else "the server closed the connection"))

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._parser is None or self._sink is None:
            return
        headers = self._headers
        self._until_close = b"content-length" not in headers and b"transfer-encoding" not in headers
        self._sink.on_head(self._parser.get_status_code(), headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(data, self._now_s)

    def on_message_complete(self) -> None:
        parser = self._parser
        if parser is not None and not parser.should_keep_alive():
            self.close()
        self._finish(None)

    # for the client
    def start(self, request: bytes, sink: ResponseSink) -> asyncio.Future[None]:
        """Write one request; the future ends with the response, or with what went wrong."""
        self.state = ConnectionState.BUSY
        self._headers = {}
        self._until_close = self.got_bytes = False
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._waiter

    def close(self) -> None:
        self.state = ConnectionState.CLOSED
        self.transport.abort()

    def _finish(self, error: Exception | None) -> None:
        waiter, self._waiter, self._sink, self._parser = self._waiter, None, None, None
        if error is not None:
            self.close()
        elif self.state is ConnectionState.BUSY:
            self.state = ConnectionState.IDLE
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


class HttpClient:
    """Requests to one server. Owns its connections: `close` drops them all."""

    def __init__(self, address: Address, *, keep_alive: bool = True) -> None:
        self.address = address
        self._keep_alive = keep_alive
        self._idle: list[_Connection] = []
        self._resolved: tuple[str, int] | None = None

    async def open(self) -> None:
        """Resolve the name once: a resolver thread a connection would be part of every latency. Raises TargetError."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        except OSError as e:
            raise TargetError(f"--url: host {self.address.host!r} does not resolve: {e.strerror or e}") from e
        # 127.0.0.1 before ::1: servers on "localhost" mostly listen on IPv4 alone.
        found.sort(key=lambda info: info[0] != socket.AF_INET)
        self._resolved = (str(found[0][4][0]), self.address.port)

    def head(self, method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
        """Request head, made ahead of time: sending is then one write."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address.host_header}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"Content-Length: {length}")
        if not self._keep_alive:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def send(self, request: bytes, sink: ResponseSink) -> None:
        """Send a whole request (head and body) and wait until its response is complete.

        A kept connection that the server dropped before the first byte of the response is replaced once: that race is
        HTTP's, not the server's failure. Raises ConnectFailedError, DisconnectedError, BadResponseError. A cancelled
        call closes its connection, which is how the server learns of it.
        """
        connection = self._take_idle() or await self._connect()
        try:
            await self._exchange(connection, request, sink)
        except DisconnectedError:
            if not connection.reused or connection.got_bytes:
                raise
            await self._exchange(await self._connect(), request, sink)

    async def get(self, path: str, headers: Mapping[str, str], timeout_s: float) -> BufferSink:
        """A plain GET. Raises as `send` does, and TimeoutError."""
        sink = BufferSink()
        async with asyncio.timeout(timeout_s):
            await self.send(self.head("GET", path, headers, 0), sink)
        return sink

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.state is ConnectionState.IDLE:
                connection.reused = True
                return connection
        return None

    async def _connect(self) -> _Connection:
        if self._resolved is None:
            await self.open()
        host, port = self._resolved or ("", 0)
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
        except OSError as e:
            reason = os.strerror(e.errno) if e.errno else str(e)
            raise ConnectFailedError(f"{host}:{port}: {reason}") from e
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, sink: ResponseSink) -> None:
        try:
            await connection.start(request, sink)
        except BaseException:
            with contextlib.suppress(Exception):
                connection.close()
            raise
        if connection.state is ConnectionState.IDLE and self._keep_alive:
            self._idle.append(connection)
        else:
            connection.close()
