"""Split a server-sent event stream into the data of its events, whatever way the bytes were cut.

The rules are those of the HTML standard's "event stream interpretation", reduced to what streams of completions use:
lines end with LF, CRLF or CR; `data` fields of one event are joined with LF; comments and other fields are ignored.
"""

from __future__ import annotations

from typing import Final

MAX_EVENT_BYTES: Final = 16 << 20


class SseSplitter:
    """Feed bytes, get the data of each event that is complete. An event cut off by the stream's end is never given."""

    __slots__ = ("_hold_cr", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._hold_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ValueError when an event grows past MAX_EVENT_BYTES."""
        if self._hold_cr or b"\r" in data:
            data = self._unify(data)
        if self._tail:
            data = self._tail + data
        parts = data.split(b"\n\n")
        self._tail = parts.pop()
        if len(self._tail) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        events = []
        for part in parts:
            # Nearly every event is one data line: no need to look at fields.
            if part.startswith(b"data: ") and b"\n" not in part:
                events.append(part[6:])
            elif (event := _data(part)) is not None:
                events.append(event)
        return events

    def _unify(self, data: bytes) -> bytes:
        """All line ends to LF. A CR at the end may be half of a CRLF: it becomes LF now, the LF to come is dropped."""
        if self._hold_cr and data.startswith(b"\n"):
            data = data[1:]
            # The CR has been answered for; an empty read must not forget it.
            self._hold_cr = False
        if data:
            self._hold_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data(block: bytes) -> bytes | None:
    """Data of one event's lines; None where it has none (comments, keep-alives, empty lines)."""
    lines = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines) if lines else None
