"""The contract between KV transfer and whatever moves its bytes.

    receiver                                             sender
    ring = transport.allocate(n)                         staging = transport.allocate(n)
    ring.descriptor() ── by any safe way ──────────────► endpoint = transport.connect(descriptor)
    ring.view: landing memory      ◄── endpoint.put(staging, offset, ring offset, n, done)

A put that reports success is in the ring: remotely complete. Nothing tells the receiver; the sender must. Nothing
protects the ring either: whoever has the descriptor can write into all of it at any time, even after the sender was
given up (see landing_ring.py for what follows from that).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TransportFault(StrEnum):
    UNAVAILABLE = "unavailable"  # the library, a device or memory can't be had
    BAD_DESCRIPTOR = "bad_descriptor"
    OUT_OF_BOUNDS = "out_of_bounds"
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    CLOSED = "closed"


class TransportError(Exception):
    """A transport operation failed. One line: what, where, what to do."""

    def __init__(self, fault: TransportFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


PutDone = Callable[[TransportError | None], None]
LostHandler = Callable[[TransportError], None]


class Region(Protocol):
    """Memory that the transport allocated and registered. Lives until the transport is closed."""

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        """uint8 [num_bytes], writable."""

    def descriptor(self) -> bytes:
        """What a peer's `connect` needs to put into this region. Opaque, at most a few KiB."""


class Endpoint(Protocol):
    """A one-way connection to one remote region. All methods are thread-safe and return at once."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """Transports and devices chosen, e.g. ("tcp/lo", "cma/memory"): what a log line should show."""

    def put(
        self, source: Region, source_offset: int, target_offset: int, num_bytes: int, timeout_s: float, done: PutDone
    ) -> None:
        """Copy source[source_offset :][: num_bytes] to target_offset of the remote region.

        `done` is called exactly once, in the transport's thread, and must not block: with None when the bytes are
        remotely complete, else with the error. After it the source is not read any more. A put that is not complete
        after timeout_s loses the whole endpoint (no single put can be taken back). A put out of either region's
        bounds is refused, and touches nothing.
        """

    def close(self) -> Future[None]:
        """Force-close: waits for no peer. Puts under way end with CLOSED first. Idempotent."""


class Transport(Protocol):
    """One side's connection to the network, with the thread that drives it. start, allocate and close may block for
    milliseconds: not for an event loop."""

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> tuple[str, ...]:
        """Transports and devices that this side could use, as lanes name them. After start()."""

    def start(self) -> None:
        """Raises TransportError (UNAVAILABLE)."""

    def allocate(self, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> Region:
        """Zeroed and registered. memory: uint8 [num_bytes] to be used instead of new; the region keeps it alive. Raises
        TransportError."""

    def connect(self, descriptor: bytes, on_lost: LostHandler) -> Future[Endpoint]:
        """Resolves without waiting for the peer; fails with TransportError.

        `on_lost` is called at most once, in the transport's thread, when the endpoint fails by itself. Never after
        its close() has resolved.
        """

    def close(self) -> None:
        """Close all endpoints, give all memory back, end the thread. Idempotent. Views become invalid to use."""
