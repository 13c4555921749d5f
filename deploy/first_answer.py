"""One real streamed request over HTTP, to show a newcomer that the cluster answers. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

QUESTION: Final = "What is a relay race? Answer in one sentence."
MAX_TOKENS: Final = 48


@dataclass(frozen=True, slots=True)
class Answer:
    """ttft_s: to the first text. num_tokens: as the server counts them; 0 if it did not say."""

    ttft_s: float
    total_s: float
    num_tokens: int


class AnswerError(Exception):
    """One line: why the request did not end with a finish reason."""


def ask(host: str, port: int, model: str, write: Callable[[str], None], *, timeout_s: float = 60.0) -> Answer:
    """Stream a chat completion (a plain one if the model has no chat template), passing text on as it arrives.

    timeout_s: longest silence. Raises AnswerError.
    """
    common = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    common["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    started = time.monotonic()
    try:
        response = _post(
            connection, "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": QUESTION}]}
        )
        if response.status == 400:
            response.read()
            response = _post(connection, "/v1/completions", {**common, "prompt": QUESTION})
        if response.status != 200:
            raise AnswerError(f"HTTP {response.status}: {_error_text(response.read())}")
        return _relay(response, write, started)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise AnswerError(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()


def _post(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def _relay(response: http.client.HTTPResponse, write: Callable[[str], None], started: float) -> Answer:
    first_s, num_tokens, finished = 0.0, 0, False
    for event in _events(response):
        if "error" in event:
            raise AnswerError(str(event["error"].get("message", event["error"])))
        num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            if text:
                first_s = first_s or time.monotonic() - started
                write(text)
            finished = finished or choice.get("finish_reason") is not None
    if not finished:
        raise AnswerError("the stream ended without a finish reason")
    return Answer(first_s, time.monotonic() - started, num_tokens)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON documents of a server-sent event stream, up to [DONE]."""
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip() if line.startswith(b"data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
