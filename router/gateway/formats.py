"""OpenAI's answer objects: a whole answer, or the chunks of a stream. Plain dicts, for orjson."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.logprobs import TokenLogprobs
from router.gateway.generation import TextDelta
from router.gateway.logprobs import TokenBytes, chat_logprobs, completion_logprobs, num_chars, prompt_logprobs
from router.spec import Finished, Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole continuation. logprobs, prompt_logprobs: see Delta; empty where not asked for."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()

    @property
    def mean_logprob(self) -> float:
        """By which the best of several are found; longer is not worse."""
        return sum(each.logprob for each in self.logprobs) / max(1, len(self.logprobs))


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """text: what a completion with `echo` begins with."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all objects of one answer share. created: Unix seconds. with_usage: the client asked for usage in a stream,
    so every chunk has the field. num_logprobs: likeliest tokens to show beside each; None: no logprobs.
    with_prompt_logprobs: the client asked for them.
    """

    answer_id: str
    created: int
    model: str
    with_token_ids: bool
    with_usage: bool
    token_bytes: TokenBytes
    num_logprobs: int | None = None
    with_prompt_logprobs: bool = False

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
    """`text_completion`, whole and streamed. echoes: of each prompt, where asked for; num_shown: choices a prompt."""

    def __init__(self, envelope: Envelope, echoes: Sequence[EchoedPrompt] = (), num_shown: int = 1) -> None:
        self._envelope = envelope
        self._echoes = echoes
        self._num_shown = num_shown
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        echo = self._echo(index)
        return None if echo is None else self._wrap(_choice(index, "text", echo.text, None), ())

    def chunk(self, index: int, delta: TextDelta) -> dict[str, Any]:
        choice = _choice(index, "text", delta.text, _reason(delta))
        if self._envelope.num_logprobs is not None:
            choice["logprobs"] = self._logprobs(index, delta.logprobs, delta.token_ids)
        return self._wrap(choice, delta.token_ids)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope.wrap("text_completion", []), "usage": usage_object(usage)}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        written = [_with_tokens(self._whole_choice(c), c, self._envelope) for c in choices]
        return {**self._envelope.wrap("text_completion", written), "usage": usage_object(usage)}

    def _whole_choice(self, c: Choice) -> dict[str, Any]:
        echo, envelope = self._echo(c.index), self._envelope
        text = c.text if echo is None else echo.text + c.text
        choice = _choice(c.index, "text", text, c.finish_reason)
        if envelope.num_logprobs is not None:
            if echo is None:
                choice["logprobs"] = self._logprobs(c.index, c.logprobs, c.token_ids)
            else:
                tokens = [*echo.token_ids, *c.token_ids]
                choice["logprobs"] = self._logprobs(c.index, [None, *c.prompt_logprobs, *c.logprobs], tokens)
        if envelope.with_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(c.prompt_logprobs, envelope.token_bytes)
        return choice

    def _logprobs(
        self, index: int, logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int]
    ) -> dict[str, Any]:
        offset, token_bytes = self._offsets.get(index, 0), self._envelope.token_bytes
        self._offsets[index] = offset + sum(num_chars(token_bytes(token_id)) for token_id in token_ids)
        return completion_logprobs(logprobs, token_ids, offset, token_bytes)

    def _echo(self, index: int) -> EchoedPrompt | None:
        return self._echoes[index // self._num_shown] if self._echoes else None

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
        choice["logprobs"] = self._logprobs(delta.logprobs) if delta.token_ids else None
        return _chunk(self._envelope, "chat.completion.chunk", choice, delta.token_ids)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope.wrap("chat.completion.chunk", []), "usage": usage_object(usage)}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        written = [_with_tokens(self._whole_choice(c), c, self._envelope) for c in choices]
        answer = {**self._envelope.wrap("chat.completion", written), "usage": usage_object(usage)}
        if self._envelope.with_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs, self._envelope.token_bytes)
        return answer

    def _whole_choice(self, c: Choice) -> dict[str, Any]:
        choice = _choice(c.index, "message", _assistant(c.text), c.finish_reason)
        choice["logprobs"] = self._logprobs(c.logprobs)
        return choice

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        num_top = self._envelope.num_logprobs
        return None if num_top is None else chat_logprobs(logprobs, num_top, self._envelope.token_bytes)


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
