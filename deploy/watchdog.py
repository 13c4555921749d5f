"""Listens to one child's sd_notify(3) messages, and says when it has been silent for too long.

A child is watched from its first WATCHDOG=1 on; one that never sends any (Redis) is not. It stops with STOPPING=1: then
the deadline of stopping holds.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Final

from common.sd_notify import SOCKET_VARIABLE
from common.silence import SilenceTimer

LOOK_S: Final = 0.5
MAX_MESSAGE_BYTES: Final = 4096


class Watchdog:
    """Belongs to the event loop; owns a socket and a timer until `close`.

    silence_s: of a watched child until on_silence is called, once; 0: never.
    """

    def __init__(self, silence_s: float, on_silence: Callable[[], None]) -> None:
        self._silence_s = silence_s
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._timer: SilenceTimer | None = None
        self._name = f"baton-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{self._name}")
        self._loop.add_reader(self._socket.fileno(), self._receive)
        self._look = self._loop.call_later(LOOK_S, self._on_look)

    @property
    def environment(self) -> dict[str, str]:
        """For the child: where to send to."""
        return {SOCKET_VARIABLE: f"@{self._name}"}

    def close(self) -> None:
        """May be called twice."""
        self._look.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _receive(self) -> None:
        try:
            words = self._socket.recv(MAX_MESSAGE_BYTES).split(b"\n")
        except OSError:
            return
        if b"STOPPING=1" in words:
            self.close()
        elif b"WATCHDOG=1" in words:
            self._timer = self._timer or SilenceTimer(LOOK_S, self._loop.time())
            self._timer.heard()

    def _on_look(self) -> None:
        if self._silence_s and self._timer and self._timer.look(self._loop.time()) >= self._silence_s:
            self.close()
            self._on_silence()
            return
        self._look = self._loop.call_later(LOOK_S, self._on_look)
