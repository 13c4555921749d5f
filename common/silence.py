"""How long another party has been silent, as far as we were awake to hear it.

A process that was stopped, or starved of CPU, finds on waking that everybody else was silent, too: what they said
meanwhile still waits to be read. So a gap between two looks counts no more than a bound.
"""

from __future__ import annotations


class SilenceTimer:
    """look_s: how often `look` is meant to be called; of a longer gap twice as much counts. Not thread-safe."""

    def __init__(self, look_s: float, now: float) -> None:
        self._longest_gap_s = 2 * look_s
        self._looked_at = now
        self.seconds = 0.0

    def heard(self) -> None:
        """It is alive."""
        self.seconds = 0.0

    def look(self, now: float) -> float:
        """Seconds of silence since the last `heard`. now: monotonic seconds."""
        self.seconds += min(max(0.0, now - self._looked_at), self._longest_gap_s)
        self._looked_at = now
        return self.seconds
