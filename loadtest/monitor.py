"""Whether the client itself kept up: its lateness, its event loop's lag, its share of a core."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np

_TICK_S: Final = 0.01
_CPU_WINDOW_S: Final = 1.0
# A client that is late although it uses less than this share of a core is not busy itself.
_STARVED_BELOW: Final = 0.5


@dataclass(slots=True)
class ClientLoad:
    """loop_lag_s: lateness of a 10 ms tick, one sample each. cpu_ratio: CPU seconds per second, one a window."""

    loop_lag_s: array[float] = field(default_factory=lambda: array("d"))
    cpu_ratio: array[float] = field(default_factory=lambda: array("d"))


async def watch_client(load: ClientLoad) -> None:
    """Samples until cancelled."""
    window_start, cpu_start = time.perf_counter(), time.process_time()
    while True:
        due = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        now = time.perf_counter()
        load.loop_lag_s.append(max(0.0, now - due))
        if now - window_start >= _CPU_WINDOW_S:
            cpu = time.process_time()
            load.cpu_ratio.append((cpu - cpu_start) / (now - window_start))
            window_start, cpu_start = now, cpu


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Above these the client, not the server, shaped the numbers.

    A lag counts once it passes max_lag_s and is not small against what it distorts: send lag against TTFT, loop lag
    against ITL.
    """

    max_lag_s: float = 0.025
    max_send_lag_of_ttft: float = 0.1
    max_loop_lag_of_itl: float = 0.5
    max_cpu_ratio: float = 0.9
    # Share of one-second windows that may be busy: a burst is not yet saturation.
    max_busy_windows: float = 0.2


def saturation_reasons(
    limits: ClientLimits, *, send_lag_p99_s: float, ttft_p50_s: float, itl_p50_s: float, load: ClientLoad
) -> list[str]:
    """Why the client counts as saturated, one line each; empty when it kept up."""
    reasons = []
    cpu = sum(load.cpu_ratio) / len(load.cpu_ratio) if load.cpu_ratio else None
    starved = ""
    if cpu is not None and cpu < _STARVED_BELOW:
        starved = f"; it used only {cpu:.0%} of a core, so other processes held it up: free one, or raise --max-lag-ms"
    send_limit = max(limits.max_lag_s, limits.max_send_lag_of_ttft * ttft_p50_s)
    if send_lag_p99_s > send_limit:
        reasons.append(
            f"client saturated: 1 % of requests left {send_lag_p99_s * 1e3:.1f} ms or more after they were due"
            f" (limit {send_limit * 1e3:.1f} ms){starved}"
        )
    loop_limit = max(limits.max_lag_s, limits.max_loop_lag_of_itl * itl_p50_s)
    loop_lag_p99 = float(np.percentile(load.loop_lag_s, 99)) if load.loop_lag_s else 0.0
    if loop_lag_p99 > loop_limit:
        reasons.append(
            f"client saturated: its event loop was {loop_lag_p99 * 1e3:.1f} ms late at the 99th percentile"
            f" (limit {loop_limit * 1e3:.1f} ms){starved}"
        )
    busy = sum(r > limits.max_cpu_ratio for r in load.cpu_ratio)
    if load.cpu_ratio and busy > limits.max_busy_windows * len(load.cpu_ratio):
        reasons.append(
            f"client saturated: more than {limits.max_cpu_ratio:.0%} of a core in {busy} of {len(load.cpu_ratio)}"
            " seconds; spread the load over several clients"
        )
    return reasons
