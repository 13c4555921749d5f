"""Frames waiting to be written to a channel. The writer takes all that have gathered: many a message when busy."""

from __future__ import annotations

import asyncio
from typing import Final, Generic, TypeVar

Frame = TypeVar("Frame")
# A peer that sends and does not read is broken: a channel never has so many frames under way by itself.
MAX_WAITING: Final = 1 << 16
MAX_PER_MESSAGE: Final = 256


class Outbox(Generic[Frame]):
    """For one event loop."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._filled = asyncio.Event()
        self._closed = False

    def put(self, frame: Frame) -> bool:
        """False: the peer does not read, the frame is lost, and the channel should be broken off."""
        if self._closed:
            return True
        if len(self._frames) >= MAX_WAITING:
            return False
        self._frames.append(frame)
        self._filled.set()
        return True

    def close(self) -> None:
        """No more frames: take() gives those that wait, then []."""
        self._closed = True
        self._filled.set()

    async def take(self) -> list[Frame]:
        """The oldest frames, at least one; [] after close()."""
        await self._filled.wait()
        taken, self._frames = self._frames[:MAX_PER_MESSAGE], self._frames[MAX_PER_MESSAGE:]
        if not self._frames and not self._closed:
            self._filled.clear()
        return taken
