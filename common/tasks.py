"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any, Final

CANCEL_AGAIN_S: Final = 0.05


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended; its result or exception is dropped.

    It is cancelled again until it obeys: on Python 3.11 asyncio.wait_for, which redis-py calls for each read and write,
    loses a cancellation that comes in the same round of the loop as the result, and a `while True` would go on forever.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()
