"""A channel's frames on one host: whole messages over a Unix socket, where a gRPC message costs several times as much.

    receiver: ControlListener ── offer, in Welcome ──► sender: connect_line
              ControlLine ◄═══ [length u32][message] ═══► ControlLine

The gRPC stream stays: it has shaken hands, it says why a channel ended, and it carries the frames of whoever can't
come here. The socket has an abstract name (unix(7)), random and without a file; who connects must bring the channel's
own token, told in Welcome only, before anything else is read. A token admits once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

import msgspec

from common.telemetry import get_logger
from kv_transfer.outbox import MAX_PER_MESSAGE

Frame = TypeVar("Frame")

TOKEN_BYTES: Final = 16
# A message holds at most MAX_PER_MESSAGE frames of some hundred bytes.
MAX_MESSAGE_BYTES: Final = 1 << 20
# What waits for a peer that does not read: beyond this the channel is broken off.
MAX_WAITING_BYTES: Final = 4 << 20
# Connections that have shown no token yet.
MAX_STRANGERS: Final = 64
_LENGTH: Final = struct.Struct("<I")

log = get_logger(__name__)


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    name: str
    token: bytes


class _Messages(asyncio.Protocol):
    """Cuts the stream into messages. A message that can't be, or that on_message can't take, ends the connection."""

    def __init__(self, on_message: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self.on_message = on_message
        self.on_lost = on_lost
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._aborted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is one, but is no subclass.
        self.transport = cast("asyncio.Transport", transport)
        if self._aborted:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := self._next()) is not None:
                self.on_message(message)
        except Exception:
            log.exception("a message of a transfer channel could not be handled")
            self.abort()

    def _next(self) -> bytes | None:
        """Raises ValueError for one that is too long."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.on_lost()

    def abort(self) -> None:
        self._aborted = True
        self._buffer.clear()
        if self.transport is not None:
            self.transport.abort()


class ControlLine(Generic[Frame]):
    """One end. For one event loop. lost: done when the connection is gone, whoever ended it.

    encode: frames to a message's bytes. Frames of one turn of the event loop travel in one message.
    """

    def __init__(self, messages: _Messages, encode: Callable[[list[Frame]], bytes]) -> None:
        self._messages = messages
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._frames: list[Frame] = []
        self.lost: Final[asyncio.Future[None]] = self._loop.create_future()
        messages.on_lost = self._on_lost

    def put(self, frame: Frame) -> bool:
        """False: the peer does not read, and the channel should be broken off. Dropped where the line is lost."""
        transport = self._messages.transport
        if transport is None or transport.is_closing():
            return True
        if not self._frames:
            self._loop.call_soon(self._flush)
        self._frames.append(frame)
        return transport.get_write_buffer_size() <= MAX_WAITING_BYTES

    def close(self) -> None:
        """What was sent still goes out, if the peer takes it. Idempotent."""
        self._flush()
        if self._messages.transport is not None:
            self._messages.transport.close()

    def abort(self) -> None:
        self._messages.abort()

    def _flush(self) -> None:
        frames, self._frames = self._frames, []
        transport = self._messages.transport
        if transport is None or transport.is_closing():
            return
        for first in range(0, len(frames), MAX_PER_MESSAGE):
            message = self._encode(frames[first : first + MAX_PER_MESSAGE])
            transport.write(_LENGTH.pack(len(message)) + message)

    def _on_lost(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


async def connect_line(
    offer: bytes, encode: Callable[[list[Frame]], bytes], on_message: Callable[[bytes], None]
) -> ControlLine[Frame] | None:
    """The sender's end; None where the receiver's socket can't be reached from here: frames then go by gRPC."""
    try:
        wanted = msgspec.msgpack.decode(offer, type=_Offer)
        transport, messages = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Messages(on_message, _ignore), sock=_connected(wanted.name)
        )
    except (msgspec.DecodeError, OSError, ValueError):
        return None
    line = ControlLine(messages, encode)
    transport.write(_LENGTH.pack(len(wanted.token)) + wanted.token)
    return line


def _connected(name: str) -> socket.socket:
    """At once, or not at all: the kernel queues who connects to a Unix socket. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(f"\0{name}".encode())
    except BaseException:
        sock.close()
        raise
    return sock


class ControlListener(Generic[Frame]):
    """The receiver's socket. attach callbacks get the line and hand back who takes its messages."""

    def __init__(self, encode: Callable[[list[Frame]], bytes], patience_s: float) -> None:
        """patience_s: within which who connects must show a token."""
        self._encode = encode
        self._patience_s = patience_s
        self._name = f"baton-{secrets.token_hex(16)}"
        self._offers: dict[bytes, Callable[[ControlLine[Frame]], Callable[[bytes], None]]] = {}
        self._strangers: set[_Messages] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(f"\0{self._name}".encode())
            sock.setblocking(False)
            self._server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=sock)
        except BaseException:
            sock.close()
            raise

    def offer(self, attach: Callable[[ControlLine[Frame]], Callable[[bytes], None]]) -> tuple[bytes, bytes]:
        """For one channel: what Welcome tells its sender, and the token by which to withdraw it."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = attach
        return msgspec.msgpack.encode(_Offer(self._name, token)), token

    def withdraw(self, token: bytes) -> None:
        self._offers.pop(token, None)

    def close(self) -> None:
        """Lines that are attached stay. Idempotent."""
        if self._server is not None:
            self._server.close()
        for stranger in list(self._strangers):
            stranger.abort()

    def _accept(self) -> _Messages:
        stranger = _Messages(_ignore, _ignore)
        stranger.on_message = lambda message: self._admit(stranger, message)
        stranger.on_lost = lambda: self._strangers.discard(stranger)
        self._strangers.add(stranger)
        loop = asyncio.get_running_loop()
        loop.call_later(self._patience_s, self._turn_away, stranger)
        if len(self._strangers) > MAX_STRANGERS:
            stranger.abort()
        return stranger

    def _turn_away(self, stranger: _Messages) -> None:
        if stranger in self._strangers:
            stranger.abort()

    def _admit(self, stranger: _Messages, token: bytes) -> None:
        self._strangers.discard(stranger)
        attach = self._offers.pop(token, None)
        if attach is None:
            stranger.abort()
            return
        stranger.on_message = attach(ControlLine(stranger, self._encode))


def _ignore(*_: object) -> None:
    pass
