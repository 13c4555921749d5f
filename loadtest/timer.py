"""A timer that wakes the event loop within some ten microseconds of an absolute time.

Event loops round their timeouts to a millisecond; counted into every latency from the intended send time, that would be
2 % of a 25 ms TTFT. Linux's timerfd has no such step. (The standard library has it from Python 3.13 on.)
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import os
import time
from collections.abc import Callable
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_TFD_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME: Final = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class PreciseTimer:
    """Calls `callback` once for each `set`. Owns a file descriptor: close it."""

    def __init__(self, callback: Callable[[], None]) -> None:
        """Raises OSError where the kernel gives no timer."""
        self._callback = callback
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._fired)

    def set(self, when_s: float) -> None:
        """when_s: time.perf_counter() seconds; the past fires at once. A new time replaces the old one."""
        # 0 would disarm the timer.
        when_ns = max(1, round(when_s * 1e9))
        spec = _Itimerspec(it_value=_Timespec(when_ns // 1_000_000_000, when_ns % 1_000_000_000))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            # Set again between the wake-up and this call.
            return
        self._callback()


class Alarms:
    """Any number of due times on one PreciseTimer. Callbacks run in order of time and must not raise.

    Owned by a run; `close` drops what is still to come.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._timer = PreciseTimer(self._ring)

    def at(self, when_s: float, callback: Callable[[], None]) -> None:
        entry = (when_s, next(self._order), callback)
        heapq.heappush(self._heap, entry)
        if self._heap[0] is entry:
            self._timer.set(when_s)

    async def wait_until(self, when_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at(when_s, lambda: None if future.done() else future.set_result(None))
        await future

    def close(self) -> None:
        self._heap.clear()
        self._timer.close()

    def _ring(self) -> None:
        while self._heap and self._heap[0][0] <= time.perf_counter():
            _, _, callback = heapq.heappop(self._heap)
            callback()
        if self._heap:
            self._timer.set(self._heap[0][0])
