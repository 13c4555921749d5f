"""The short way of a running stream's tokens: news ─► text ─► one pre-rendered event ─► the transport, no task woken.

    run.notify ─► Mailbox.post ─► call_soon ─► ExpressLane.handle ─┬─ written: nothing else happens
                                                                   └─ anything unusual: the stream's task takes over

Unusual is whatever is not text of a running generation that has begun: its end, an error, a client that takes no bytes.
All that decides how an answer looks stays in responses.py and formats.py; frames are made from theirs.
"""

from __future__ import annotations

from typing import Final

import orjson

from router.gateway.connection import Connection
from router.gateway.errors import as_baton_error
from router.gateway.formats import AnswerFormat
from router.gateway.generation import Generation, TextDelta
from router.gateway.group import GenerationGroup

# Stands where the text will be; no other part of a chunk holds it.
_MARK: Final = "\x00text\x00"


class ExpressLane:
    """One stream's, from its first written event on. opened: choices whose opening was written."""

    def __init__(self, connection: Connection, group: GenerationGroup, answer: AnswerFormat, opened: set[int]) -> None:
        self._connection = connection
        self._group = group
        self._answer = answer
        self._opened = opened
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def handle(self, generation: Generation) -> bool:
        """Whether all its news were written; else they are for the stream's task, in the group."""
        if generation.index not in self._opened or not self._connection.ready or generation.ended:
            return False
        try:
            text = generation.take_text()
            if text is not None:
                if text:
                    self._write(generation, text)
                return True
            delta = generation.take()
        except Exception as error:  # what was taken is lost: the stream must not go on as if it were not
            generation.close()
            delta = TextDelta(0, (), "", as_baton_error(error, generation.request_id))
        if delta.end is not None:
            self._group.put_back(generation, delta)
            return False
        if delta.text:
            self._write(generation, delta.text)
        return True

    def _write(self, generation: Generation, text: str) -> None:
        before, after = self._frames.get(generation.index) or self._frame(generation.index)
        self._connection.write_chunk(before + orjson.dumps(text) + after)
        generation.mark_written()

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        chunk = orjson.dumps(self._answer.chunk(index, TextDelta(0, (), _MARK, None)))
        before, after = chunk.split(orjson.dumps(_MARK))
        self._frames[index] = frame = b"data: " + before, after + b"\n\n"
        return frame
