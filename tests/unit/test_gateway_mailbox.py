"""The mailbox between a client's requests and its writer."""

from __future__ import annotations

import asyncio

import pytest

from router.gateway.mailbox import ClosedMailboxError, Mailbox


async def test_an_item_posted_many_times_is_listed_once_and_in_order():
    mailbox: Mailbox[str] = Mailbox()
    for item in ("a", "b", "a", "a", "b"):
        mailbox.post(item)
    assert [await mailbox.get(), await mailbox.get()] == ["a", "b"]
    mailbox.post("a")
    assert await mailbox.get() == "a"


async def test_a_waiting_consumer_is_woken_by_a_post_and_by_closing():
    mailbox: Mailbox[str] = Mailbox()
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.post("a")
    assert await waiting == "a"
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.close()
    with pytest.raises(ClosedMailboxError):
        await waiting


async def test_closed_means_closed_even_with_items_left():
    mailbox: Mailbox[str] = Mailbox()
    mailbox.post("a")
    mailbox.close()
    for _ in range(2):
        with pytest.raises(ClosedMailboxError):
            await mailbox.get()


async def test_a_cancelled_get_loses_no_item():
    mailbox: Mailbox[str] = Mailbox()
    waiting = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.post("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await mailbox.get() == "a"
