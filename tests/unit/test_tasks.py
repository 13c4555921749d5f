"""Tasks end when they are told to."""

from __future__ import annotations

import asyncio

import pytest

from common.tasks import end_task


async def test_a_task_that_loses_a_cancellation_ends_all_the_same():
    """As asyncio.wait_for does on Python 3.11, when the result is there already."""
    lost = 0

    async def work() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost == 3:
                    raise
                lost += 1

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await end_task(task)
    assert task.cancelled()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_task_that_has_ended_is_left_alone(fails):
    async def work() -> int:
        if fails:
            raise ValueError("nobody asks")
        return 1

    task = asyncio.create_task(work())
    await asyncio.wait({task})
    await end_task(task)
    assert not task.cancelled()
