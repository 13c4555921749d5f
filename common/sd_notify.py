"""Tells whoever started this process how it is: sd_notify(3), as systemd and `baton serve` listen for it.

READY=1: it serves. WATCHDOG=1: it is alive; a supervisor that hears nothing more for its watchdog's time restarts it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Final

SOCKET_VARIABLE: Final = "NOTIFY_SOCKET"
PAT_S: Final = 1.0


def notify(message: str) -> None:
    """Send `message`, if there is a listener. Never blocks, never raises: it is for information."""
    path = os.environ.get(SOCKET_VARIABLE, "")
    if not path:
        return
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto(message.encode(), address)
    except OSError:
        return


async def keep_alive() -> None:
    """Pat the watchdog until cancelled: as long as the event loop runs."""
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(PAT_S)
