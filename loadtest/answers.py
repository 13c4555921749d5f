"""One streamed completion, kept whole: every choice's tokens, text, logprobs and end, and when each event came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """How one request went. failure: "" for a whole answer, else an HTTP status, an error code or a broken connection.

    times: monotonic seconds of each event with tokens, and how many it brought. local_port: of its connection.
    """

    sent_at: float
    request_id: str = ""
    local_port: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    failure: str = ""
    ended_at: float = 0.0
    times: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    @property
    def content(self) -> tuple[Any, ...]:
        """All that must be equal however the cluster fares."""
        choices = tuple((i, c.token_ids, c.text, c.finish_reason) for i, c in sorted(self.choices.items()))
        usage = self.usage or {}
        return choices, usage.get("prompt_tokens"), usage.get("completion_tokens")


async def stream_completion(
    client: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    on_event: Callable[[Answer], Awaitable[None]] | None = None,
) -> Answer:
    """Never raises for what a server or its death does: that is in `failure`. on_event: awaited after each event."""
    answer = Answer(time.monotonic())
    asked = {**body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=asked) as response:
            if response.status_code != 200:
                answer.failure = f"http {response.status_code}"
                await response.aread()
                return answer
            answer.request_id = response.headers.get("x-request-id", "")
            answer.local_port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            done = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    _add(answer, json.loads(line[6:]))
                    if on_event is not None:
                        await on_event(answer)
            if not done and not answer.failure:
                answer.failure = "cut off"
    except httpx.HTTPError as error:
        answer.failure = answer.failure or f"broken: {type(error).__name__}"
    except asyncio.CancelledError:
        answer.failure = "cancelled"
        raise
    finally:
        answer.ended_at = time.monotonic()
    return answer


def _add(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.failure = str(event["error"].get("code"))
        return
    answer.usage = event.get("usage") or answer.usage
    num_new = 0
    for told in event.get("choices", ()):
        choice = answer.choices.setdefault(told["index"], Choice())
        num_new += len(told.get("token_ids") or ())
        choice.token_ids += told.get("token_ids") or ()
        choice.text += told.get("text") or ""
        choice.logprobs += (told.get("logprobs") or {}).get("token_logprobs") or ()
        choice.finish_reason = told["finish_reason"] or choice.finish_reason
    if num_new:
        answer.times.append((time.monotonic(), num_new))
