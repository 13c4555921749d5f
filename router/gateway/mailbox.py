"""Which of a client's requests have news: many producers on the event loop, one consumer, no task and no copy between.

An item is listed at most once however often it is posted, so a slow consumer costs no memory: it finds all that was
missed when it comes to take it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ClosedMailboxError(Exception):
    """The client is gone; nobody reads any more."""


class Mailbox(Generic[T]):
    """Items are hashable by identity."""

    def __init__(self) -> None:
        self._ready: deque[T] = deque()
        self._listed: set[T] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._express: Callable[[T], bool] | None = None
        self._on_the_way: set[T] = set()

    def set_express(self, handle: Callable[[T], bool] | None) -> None:
        """From now on each posted item is first shown to `handle`, in the loop's next round, without waking the
        consumer; it is listed only where `handle` returns False. None: no more.
        """
        self._express = handle

    def post(self, item: T) -> None:
        if self._express is None or not self._idle:
            self._list(item)
        elif item not in self._on_the_way:
            self._on_the_way.add(item)
            asyncio.get_running_loop().call_soon(self._try_express, item)

    def _try_express(self, item: T) -> None:
        self._on_the_way.discard(item)
        done = False
        try:
            done = self._express is not None and self._idle and self._express(item)
        finally:
            if not done:
                self._list(item)

    @property
    def _idle(self) -> bool:
        """The consumer waits, with nothing in its hands that it has yet to pass on: what is written now is in order."""
        return self._waiter is not None and not self._waiter.done() and not self._ready

    def _list(self, item: T) -> None:
        if item not in self._listed:
            self._listed.add(item)
            self._ready.append(item)
            self._wake()

    def close(self) -> None:
        """The consumer's present or next `get` raises ClosedMailboxError."""
        self._closed = True
        self._wake()

    async def get(self) -> T:
        """The item that was posted first; posts from now on list it anew."""
        while not self._ready and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._closed:
            raise ClosedMailboxError
        item = self._ready.popleft()
        self._listed.discard(item)
        return item

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
