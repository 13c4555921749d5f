"""Starting a transport under a demand for one kind of lane."""

from __future__ import annotations

from kv_transfer.transport.base import Transport, TransportError, TransportFault
from kv_transfer.transport.lanes import unavailable


def start_transport(transport: Transport, required: str) -> None:
    """Raises TransportError (UNAVAILABLE), and leaves nothing running, where it can't start or this host has nothing
    of the `required` kind (LaneKind or ANY_KIND)."""
    transport.start()
    if (problem := unavailable(required, transport.devices)) is not None:
        transport.close()
        hint = "load the driver, name another ucx_library, or lower the demand"
        raise TransportError(TransportFault.UNAVAILABLE, f"{problem}: {hint}")
