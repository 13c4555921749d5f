"""From settings to a transport."""

from __future__ import annotations

from typing import Final

from common.config import Settings
from common.errors import StartupError
from kv_transfer.transport.base import Transport
from kv_transfer.transport.sockets import SocketsSettings, SocketsTransport
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_worker import UcxSettings, is_loopback, net_devices_for

LOOPBACK_ONLY: Final = "loopback-only"


def make_transport(settings: Settings) -> Transport:
    """Not started. Raises StartupError where settings would carry KV in the clear to other hosts without saying so."""
    exposed = [host for host in (settings.host, settings.dial_host) if not is_loopback(host)]
    if exposed and settings.transfer_security == LOOPBACK_ONLY:
        raise StartupError(
            f"KV would be served on {exposed[0]} to whoever reaches it, in the clear: where that network is trusted, "
            "say so with --set transfer_security=plaintext-trusted-network; else set host to 127.0.0.1"
        )
    if settings.transfer_transport == "sockets":
        return SocketsTransport(SocketsSettings(settings.host, settings.dial_host))
    devices = net_devices_for(settings.ucx_net_devices, settings.host)
    return UcxTransport(UcxSettings(library=settings.ucx_library, net_devices=devices))
