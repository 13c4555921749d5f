"""Live progress on standard error while a run goes on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import Final

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from loadtest.gauges import GaugeSeries
from loadtest.record import Failure, RequestRecord
from loadtest.runner import LoadRun

# A refresh costs 0.2 ms of the event loop: rarely enough to leave ITL alone.
_TERMINAL_PERIOD_S: Final = 0.5
_LOG_PERIOD_S: Final = 10.0
_WINDOW_S: Final = 10.0


class ProgressTally:
    """Running totals for the display; `done` is the run's on_done callback."""

    def __init__(self) -> None:
        self.ok = 0
        self.errors: Counter[str] = Counter()
        self._tokens_done = 0
        self._recent: deque[tuple[float, float]] = deque()
        self._last: tuple[float, int, int] | None = None

    def done(self, record: RequestRecord) -> None:
        self._tokens_done += record.event_tokens
        if record.ok:
            self.ok += 1
            self._recent.append((record.end_s, record.ttft_s or 0.0))
        elif record.failure is not Failure.CANCELLED:
            self.errors[record.failure_name] += 1

    def line(self, run: LoadRun, gauges: GaugeSeries | None, now_s: float) -> str:
        """The state at now_s in one line; rates since the line before."""
        running = list(run.running)
        tokens = self._tokens_done + sum(r.event_tokens for r in running)
        finished = self.ok + sum(self.errors.values())
        origin = run.result.origin_s
        last_s, last_tokens, last_finished = self._last or (origin, 0, 0)
        span = max(1e-3, now_s - last_s)
        self._last = (now_s, tokens, finished)
        while self._recent and self._recent[0][0] < now_s - _WINDOW_S:
            self._recent.popleft()
        parts = [
            f"{max(0.0, now_s - origin):.1f} s",
            f"{finished} done ({(finished - last_finished) / span:.1f}/s)",
            f"{len(running)} running",
            self._ttft(),
            f"{(tokens - last_tokens) / span:,.0f} tok/s",
        ]
        if gauges is not None and gauges.times_s:
            shown = [(label, gauges.values[name][-1]) for label, name in (("waiting", "waiting"), ("KV", "kv_use"))]
            parts += [f"{label} {value:.0%}" if label == "KV" else f"{value:.0f} {label}" for label, value in shown]
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.most_common(3))
        parts.append(f"errors: {errors}" if errors else "no errors")
        return " · ".join(parts)

    def _ttft(self) -> str:
        if not self._recent:
            return "TTFT –"
        p50, p95 = np.percentile([ttft for _, ttft in self._recent], [50, 95]) * 1e3
        return f"TTFT p50 {p50:,.0f} p95 {p95:,.0f} ms"


async def show_progress(run: LoadRun, tally: ProgressTally, gauges: GaugeSeries | None, console: Console) -> None:
    """Until cancelled: a line rewritten in place on a terminal, else a line now and then."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LOG_PERIOD_S)
            console.print(tally.line(run, gauges, time.perf_counter()), soft_wrap=True, highlight=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(tally.line(run, gauges, time.perf_counter())), refresh=True)
            await asyncio.sleep(_TERMINAL_PERIOD_S)
