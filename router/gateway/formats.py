"""OpenAI's answer objects: a whole answer, or the chunks of a stream. Plain dicts, for orjson."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.gateway.generation import TextDelta
from router.spec import Finished, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole continuation."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all objects of one answer share. created: Unix seconds. with_usage: the client asked for usage in a stream,
    so every chunk has the field.
    """

    answer_id: str
    created: int
    model: str
    with_token_ids: bool
    with_usage: bool

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}


class AnswerFormat(Protocol):
    """How one endpoint writes what was generated."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk before the first of choice `index`, if the endpoint has one."""

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]: ...


class CompletionFormat:
    """`text_completion`, whole and streamed."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        return self._wrap(_choice(index, "text", delta.text, _reason(delta)), delta.token_ids)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope.wrap("text_completion", []), "usage": usage_object(usage)}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        written = [_with_tokens(_choice(c.index, "text", c.text, c.finish_reason), c, self._envelope) for c in choices]
        return {**self._envelope.wrap("text_completion", written), "usage": usage_object(usage)}

    def _wrap(self, choice: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
        return _chunk(self._envelope, "text_completion", choice, token_ids)


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    def opening(self, index: int) -> dict[str, Any] | None:
        choice = _choice(index, "delta", {"role": "assistant", "content": ""}, None)
        return _chunk(self._envelope, "chat.completion.chunk", choice, ())

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        choice = _choice(index, "delta", content, _reason(delta))
        return _chunk(self._envelope, "chat.completion.chunk", choice, delta.token_ids)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope.wrap("chat.completion.chunk", []), "usage": usage_object(usage)}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        written = [
            _with_tokens(_choice(c.index, "message", _assistant(c.text), c.finish_reason), c, self._envelope)
            for c in choices
        ]
        return {**self._envelope.wrap("chat.completion", written), "usage": usage_object(usage)}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None}


def _choice(index: int, field: str, content: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, field: content, "logprobs": None, "finish_reason": finish_reason}


def _chunk(envelope: Envelope, kind: str, choice: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
    if envelope.with_token_ids:
        choice["token_ids"] = token_ids
    chunk = envelope.wrap(kind, [choice])
    if envelope.with_usage:
        chunk["usage"] = None
    return chunk


def _with_tokens(written: dict[str, Any], choice: Choice, envelope: Envelope) -> dict[str, Any]:
    return {**written, "token_ids": choice.token_ids} if envelope.with_token_ids else written


def _reason(delta: TextDelta) -> str | None:
    return delta.end.reason.value if isinstance(delta.end, Finished) else None
