"""The connection under an HTTP answer: written to without a task of its own, as long as the client takes the bytes.

ASGI's `send` costs a coroutine and a task's wake-up a write. A stream of tokens passes them by: its chunks go straight
into the transport, framed as the server frames them, between the head and the end that went through `send`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

SCOPE_KEY: Final = "baton.connection"


class Connection:
    """cycle: uvicorn's RequestResponseCycle of one request, which owns transport and state."""

    __slots__ = ("_cycle", "_write")

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write

    @property
    def ready(self) -> bool:
        """Whether bytes written now leave, rather than pile up; False before the head and after the end, too."""
        cycle = self._cycle
        return bool(
            cycle.response_started
            and cycle.chunked_encoding
            and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write_chunk(self, data: bytes) -> None:
        """One chunk of a chunked body (RFC 9112, 7.1); only while `ready`, and never empty."""
        self._write(b"%x\r\n%b\r\n" % (len(data), data))


def connection_of(scope: MutableMapping[str, Any]) -> Connection | None:
    """None where the server is not ours, as in tests."""
    found: Connection | None = scope.get(SCOPE_KEY)
    return found
