"""What a worker does when memory runs short: next_pressure decides, the rest reads and tells.

    used      < close        ≥ close                 ≥ shed
              OPEN           CLOSED: no new work     SHED: half of what runs gives way, again at each look; small chunks
    back      only when used is RELIEF below `close`, so that nothing flaps

KV pools are allocated at the start: what grows is the steps' own buffers, and everybody else on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from common.device import device_used_ratio
from common.engine.messages import MemoryCommand, MemoryPressure
from common.telemetry import get_logger

RELIEF: Final = 0.02
LOOK_S: Final = 1.0
# A device's memory is the engine's own, and nearly all of it is meant to be in use.
DEVICE_CLOSE_RATIO: Final = 0.985
_CGROUP: Final = Path("/sys/fs/cgroup")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Ratios of what there is. close at 1 or more: never."""

    close: float

    @property
    def shed(self) -> float:
        """Half of the rest."""
        return (1 + self.close) / 2


def next_pressure(now: MemoryPressure, used_ratio: float, limits: MemoryLimits) -> MemoryPressure:
    if limits.close >= 1:
        return MemoryPressure.OPEN
    if used_ratio >= limits.shed:
        return MemoryPressure.SHED
    if used_ratio >= limits.close:
        return MemoryPressure.CLOSED
    if now is not MemoryPressure.OPEN and used_ratio >= limits.close - RELIEF:
        return MemoryPressure.CLOSED
    return MemoryPressure.OPEN


def host_used_ratio(cgroup: Path = _CGROUP) -> float:
    """Of the machine's memory, or of the container's where that is nearer to its limit. Caches that the kernel can drop
    don't count."""
    machine = psutil.virtual_memory()
    used = 1 - machine.available / machine.total
    with contextlib.suppress(OSError, ValueError, StopIteration):  # no cgroup v2, or no limit ("max")
        limit = int((cgroup / "memory.max").read_text())
        stat = (cgroup / "memory.stat").read_text().splitlines()
        droppable = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
        used = max(used, (int((cgroup / "memory.current").read_text()) - droppable) / limit)
    return used


async def watch_memory(limits: MemoryLimits, tell: Callable[[MemoryCommand], None]) -> None:
    """Tell of each change, and each second of SHED; until cancelled. limits: of host memory."""
    host = device = shown = MemoryPressure.OPEN
    while True:
        host_ratio, device_ratio = host_used_ratio(), device_used_ratio()
        host = next_pressure(host, host_ratio, limits)
        device = next_pressure(device, device_ratio, MemoryLimits(DEVICE_CLOSE_RATIO))
        pressure = max(host, device, key=list(MemoryPressure).index)
        if pressure is not shown:
            _log.warning("memory", pressure=pressure.value, host=round(host_ratio, 3), device=round(device_ratio, 3))
        if pressure is not shown or pressure is MemoryPressure.SHED:
            tell(MemoryCommand(pressure))
        shown = pressure
        await asyncio.sleep(LOOK_S)
