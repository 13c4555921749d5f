"""ASGI responses that generate: one JSON object at the end, or server-sent events as tokens come.

A stream's status line waits for the first news, so that a request that fails before any token is an HTTP error.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import BatonError
from common.logprobs import TokenLogprobs
from common.telemetry import get_logger
from router.gateway.connection import connection_of
from router.gateway.errors import as_baton_error, error_json, error_response
from router.gateway.express import ExpressLane
from router.gateway.formats import AnswerFormat, Choice
from router.gateway.generation import TextDelta
from router.gateway.group import GenerationGroup
from router.gateway.mailbox import ClosedMailboxError
from router.spec import Finished

# Past a request's deadline, a connection that takes no bytes is given up.
WRITE_GRACE_S: Final = 5.0
DONE: Final = b"data: [DONE]\n\n"

_log = get_logger(__name__)


class _GeneratingResponse(Response):
    """deadline: the event loop's seconds; nothing is written later than a little after it."""

    def __init__(
        self, start: Callable[[], GenerationGroup], answer: AnswerFormat, request_id: str, deadline: float
    ) -> None:
        super().__init__(headers={"x-request-id": request_id})
        self._start = start
        self._answer = answer
        self._request_id = request_id
        self._deadline = deadline
        self._started = False  # the status line is out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            group = self._start()
            async with asyncio.timeout_at(self._deadline + WRITE_GRACE_S), group.watched(receive):
                await self._generate(group, scope, receive, send)
        except ClosedMailboxError:
            _log.debug("client is gone", request_id=self._request_id)
        except TimeoutError:
            _log.warning("client takes no bytes, connection given up", request_id=self._request_id)
        except Exception as error:
            known = as_baton_error(error, self._request_id)
            if self._started:
                await _write(send, _event(error_json(known)), last=True)
            else:
                await error_response(known, self._request_id)(scope, receive, send)

    async def _generate(self, group: GenerationGroup, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeAnswer(_GeneratingResponse):
    """One JSON object. An error of any choice is the answer's.

    num_made, num_shown: choices of a prompt; where fewer are shown, they are the likeliest, by mean logprob.
    """

    def __init__(
        self,
        start: Callable[[], GenerationGroup],
        answer: AnswerFormat,
        request_id: str,
        deadline: float,
        *,
        num_made: int,
        num_shown: int,
    ) -> None:
        super().__init__(start, answer, request_id, deadline)
        self._num_made = num_made
        self._num_shown = num_shown

    async def _generate(self, group: GenerationGroup, scope: Scope, receive: Receive, send: Send) -> None:
        drafts: dict[int, _Draft] = defaultdict(_Draft)
        while not group.done:
            generation, delta = await group.next()
            drafts[generation.index].add(delta)
            if isinstance(delta.end, BatonError):
                raise delta.end
            generation.mark_written()
        made = [drafts[index].choice(index) for index in sorted(drafts)]
        body = orjson.dumps(self._answer.whole(self._shown(made), group.usage))
        headers = {"x-request-id": self._request_id}
        await Response(body, 200, headers, "application/json")(scope, receive, send)

    def _shown(self, made: list[Choice]) -> list[Choice]:
        """Of each prompt the best num_shown, numbered through. The prompt's logprobs came with its first choice."""
        shown: list[Choice] = []
        for first in range(0, len(made), self._num_made):
            group = made[first : first + self._num_made]
            prompt_logprobs = group[0].prompt_logprobs
            if self._num_shown < self._num_made:
                group = sorted(group, key=lambda choice: -choice.mean_logprob)[: self._num_shown]
            shown += [
                replace(choice, index=len(shown) + i, prompt_logprobs=prompt_logprobs) for i, choice in enumerate(group)
            ]
        return shown


class _Draft:
    """What has come of one choice so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._reason = ""

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        if isinstance(delta.end, Finished):
            self._reason = delta.end.reason.value

    def choice(self, index: int) -> Choice:
        text = "".join(self._texts)
        return Choice(index, text, self._token_ids, self._reason, self._logprobs, self._prompt_logprobs)


class EventStream(_GeneratingResponse):
    """Server-sent events, one write for all that is new of a choice. A slow reader finds many tokens in one chunk.

    with_usage: a last chunk has the usage. with_empty_text: chunks are sent even where their tokens add no text yet.
    only_text: chunks in mid-stream hold text and nothing else, so they may take the short way (express.py).
    """

    def __init__(
        self,
        start: Callable[[], GenerationGroup],
        answer: AnswerFormat,
        request_id: str,
        deadline: float,
        *,
        with_usage: bool,
        with_empty_text: bool,
        only_text: bool = False,
    ) -> None:
        super().__init__(start, answer, request_id, deadline)
        self._with_usage = with_usage
        self._with_empty_text = with_empty_text
        self._only_text = only_text

    async def _generate(self, group: GenerationGroup, scope: Scope, receive: Receive, send: Send) -> None:
        opened: set[int] = set()
        connection, express = connection_of(scope), False
        while not group.done:
            generation, delta = await group.next()
            failed = isinstance(delta.end, BatonError)
            if isinstance(delta.end, BatonError) and not self._started:
                raise delta.end
            events = self._events(generation.index, delta, opened)
            if not events:
                continue
            if not self._started:
                self._started = True
                await send(self._head())
            if group.done and not failed:
                events += self._closing(group)
            await _write(send, events, last=failed or group.done)
            generation.mark_written()
            if failed:
                return
            if self._only_text and not express and connection is not None:
                express = True
                group.set_express(ExpressLane(connection, group, self._answer, opened).handle)

    def _events(self, index: int, delta: TextDelta, opened: set[int]) -> bytes:
        """The news of one choice; empty where a client would see nothing new."""
        chunks: list[dict[str, Any] | None] = []
        told = self._with_empty_text and delta.token_ids
        if delta.text or delta.logprobs or isinstance(delta.end, Finished) or told:
            if index not in opened:
                opened.add(index)
                chunks.append(self._answer.opening(index))
            chunks.append(self._answer.chunk(index, delta))
        events = b"".join(_event(orjson.dumps(chunk)) for chunk in chunks if chunk is not None)
        return events + _event(error_json(delta.end)) if isinstance(delta.end, BatonError) else events

    def _closing(self, group: GenerationGroup) -> bytes:
        usage = _event(orjson.dumps(self._answer.usage_chunk(group.usage))) if self._with_usage else b""
        return usage + DONE

    def _head(self) -> dict[str, Any]:
        headers = (
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._request_id.encode()),
        )
        return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _write(send: Send, body: bytes, *, last: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
