"""What plain sockets say to each other, and one accepted connection at the side whose region is written.

    sender      HELLO magic, token            HEADER put, offset, num_bytes   payload …      HEADER …
    receiver                                                                  ACK put, status

Puts are done one after the other, in order; so are their acknowledgements.
"""

from __future__ import annotations

import hmac
import socket
import struct
from typing import Final

import numpy as np
import numpy.typing as npt

MAGIC: Final = b"BatonKV1"
TOKEN_BYTES: Final = 16
HELLO_BYTES: Final = len(MAGIC) + TOKEN_BYTES
HEADER: Final = struct.Struct("<QQQ")
ACK: Final = struct.Struct("<QB")
ACK_OK: Final = 0
ACK_OUT_OF_BOUNDS: Final = 1
# What one connection moves before others get their turn.
TURN_BYTES: Final = 4 << 20
# The kernel doubles these, and caps them at net.core.{w,r}mem_max.
BUFFER_BYTES: Final = 4 << 20


def tune(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class InboundConnection:
    """Writes what a peer puts into `region`, uint8 [num_bytes], once the peer has shown `token`. For one thread."""

    def __init__(self, connection: socket.socket, region: npt.NDArray[np.uint8], token: bytes, hello_by: float) -> None:
        self.socket = connection
        self._region = memoryview(region.data)
        self._token = token
        # When a peer that has not shown the token is dropped; None once it has.
        self.hello_by: float | None = hello_by
        self._head = bytearray(HELLO_BYTES)
        self._head_fill = 0
        self._put = 0
        self._target: memoryview | None = None
        self._acks = bytearray()

    @property
    def wants_write(self) -> bool:
        return bool(self._acks)

    def turn(self) -> bool:
        """Read and write what can be without waiting, up to a turn's bytes. False: the connection is over."""
        try:
            return self._read(TURN_BYTES) and self._write()
        except BlockingIOError:
            return self._write_if_possible()
        except OSError:
            return False

    def _write_if_possible(self) -> bool:
        try:
            return self._write()
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _read(self, budget: int) -> bool:
        while budget > 0:
            if self._target is not None:
                received = self.socket.recv_into(self._target, min(len(self._target), budget))
                self._target = self._target[received:]
                if received and not self._target:
                    self._end_put()
            else:
                wanted = HELLO_BYTES if self.hello_by is not None else HEADER.size
                received = self.socket.recv_into(memoryview(self._head)[self._head_fill : wanted])
                self._head_fill += received
                if self._head_fill == wanted and not self._on_head():
                    return False
            if received == 0:
                return False
            budget -= received
        return True

    def _on_head(self) -> bool:
        self._head_fill = 0
        if self.hello_by is not None:
            self.hello_by = None
            return hmac.compare_digest(bytes(self._head), MAGIC + self._token)
        self._put, offset, num_bytes = HEADER.unpack_from(self._head)
        if offset + num_bytes > len(self._region):
            self._acks += ACK.pack(self._put, ACK_OUT_OF_BOUNDS)
            self._write_if_possible()
            return False
        self._target = self._region[offset : offset + num_bytes]
        if num_bytes == 0:
            self._end_put()
        return True

    def _end_put(self) -> None:
        self._target = None
        self._acks += ACK.pack(self._put, ACK_OK)

    def _write(self) -> bool:
        while self._acks:
            del self._acks[: self.socket.send(self._acks)]
        return True
