"""Liveness of a channel's peer: silence longer than a lease is death. Pure; the owner ticks it.

Any frame renews. The sender sends heartbeats when either side is quiet; the receiver answers each in kind. Silence is
added up in ticks of at most 1/8 lease: when it is our own process that stood still, the peer's frames wait unread, and
one long tick must not pass for the peer's silence.
"""

from __future__ import annotations

from typing import Final

TICKS_PER_LEASE: Final = 8
# Heartbeats after so many ticks without a frame in either direction: a quarter of a lease.
HEARTBEAT_TICKS: Final = 2


class Lease:
    """One side's view of one channel. `tick` is to be called every tick_s."""

    def __init__(self, lease_s: float) -> None:
        self.tick_s: Final = lease_s / TICKS_PER_LEASE
        self._silent_ticks = 0.0
        self._quiet_ticks = 0

    def heard(self) -> None:
        """A frame came from the peer."""
        self._silent_ticks = 0.0

    def sent(self) -> None:
        """A frame went to the peer."""
        self._quiet_ticks = 0

    def tick(self, elapsed_s: float) -> bool:
        """elapsed_s: since the last tick. False: the lease is lost, at the latest one lease after the last frame."""
        self._silent_ticks += min(elapsed_s / self.tick_s, 1.0)
        self._quiet_ticks += 1
        return self._silent_ticks < TICKS_PER_LEASE - 1

    @property
    def heartbeat_due(self) -> bool:
        return max(self._quiet_ticks, self._silent_ticks) >= HEARTBEAT_TICKS
