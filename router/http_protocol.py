"""uvicorn's HTTP/1.1 connection with the bounds that it lacks: no client holds a socket or memory by doing nothing.

accepted ──► head complete ──► body, answer: bounded by the gateway ──► idle ──► next head …
    │ HEAD_TIMEOUT_S, MAX_HEAD_BYTES              │ closing, not read     │ keep-alive timeout
    └──► aborted                                  └─ LINGER_S ─► aborted  └──► aborted
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.gateway.connection import SCOPE_KEY, Connection

HEAD_TIMEOUT_S: Final = 15.0
# The first read of a head is not counted, so some more may pass.
MAX_HEAD_BYTES: Final = 1 << 17
# For a client to read what was written before its connection was closed.
LINGER_S: Final = 10.0
# After the client's half of the connection ended.
FIRST_PROBE_S: Final = 0.02
PROBE_S: Final = 1.0
# A comment of an event stream, as a chunk: the only chunked answers are event streams.
EMPTY_EVENT: Final = b"3\r\n:\n\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn makes it and calls everything here on the event loop."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_number = 0
        self._head_bytes = 0
        self._running: Any = None  # uvicorn's cycle of the request that is being answered
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_over()
        super().connection_lost(exc)
        # uvicorn tells only the newest of pipelined requests.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """What arrives while no request runs must become a head in time."""
        number = self._head_number
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        if self._in_head and number == self._head_number:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The request's head is larger than {MAX_HEAD_BYTES >> 10} KiB.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._head_number += 1

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_is_over()
        super().on_headers_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that sends no more may still read: what it asked for is answered, then the connection ends.

        One that is gone altogether looks the same until it is written to; so something harmless is, now and again.
        """
        cycle = self._running
        if cycle is None or cycle.more_body or cycle.response_complete or cycle.disconnected:
            return False
        cycle.keep_alive = False
        self._probe(FIRST_PROBE_S)
        return True

    def _probe(self, next_s: float = PROBE_S) -> None:
        """The first write makes a host whose client is gone answer with a reset, the second one fails by it."""
        cycle = self._running
        if self.transport.is_closing() or cycle.response_complete:
            return
        if cycle.response_started and cycle.chunked_encoding:
            self.transport.write(EMPTY_EVENT)
        elif not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(next_s, self._probe)

    def timeout_keep_alive_handler(self) -> None:
        # Not close(): it would wait for a client that doesn't read.
        self.transport.abort()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        async def then_let_go(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                self.loop.call_soon(self._linger)  # after uvicorn has closed what it wants to close

        self._running = cycle
        cycle.scope[SCOPE_KEY] = Connection(cycle)
        super()._start_asgi_task(cycle, then_let_go)

    def _linger(self) -> None:
        if self.transport.is_closing():
            self.loop.call_later(LINGER_S, self.transport.abort)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _head_is_over(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
