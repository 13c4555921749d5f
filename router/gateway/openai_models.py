"""Bodies of the OpenAI endpoints. Types are strict; ranges are checked where gRPC's are, in validation.py.

Unknown fields are ignored, as OpenAI's servers do for clients of a later day. Known fields that would change the answer
and are not served are refused, unless they hold the value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import BatonError, invalid
from router.gateway.prompts import AskedSampling, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.gateway.validation import MAX_LOGIT_BIAS

# Field → whether a value changes nothing.
_NEUTRAL: Final[dict[str, Callable[[Any], bool]]] = {
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
    "function_call": lambda v: v in ("none", "auto"),
    "response_format": lambda v: v == {"type": "text"},
    "suffix": lambda v: v == "",
    # Of /v1/completions; there they are served.
    "best_of": lambda v: type(v) is int and v == 1,
    "echo": lambda v: v is False,
}


MAX_PROMPTS: Final = 128
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_TOKEN_ID_DIGITS: Final = 10
MAX_MESSAGES: Final = 10_000
T = TypeVar("T")
# One wrong item is enough: a million complaints would stop the event loop for a minute.
_List = Annotated[list[T], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationBody(_Body):
    """Fields that both endpoints share."""

    served_fields: ClassVar[frozenset[str]] = frozenset()

    model: str | None = Field(None, description="the served model's name; left out: the only one")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, description="bound on the output's tokens")
    temperature: float | None = Field(None, description="0 to 2; 0 is greedy; default 1")
    top_p: float | None = Field(None, description="above 0, to 1")
    top_k: int | None = Field(None, description="0 or -1: off")
    min_p: float | None = Field(None, description="0 to 1; relative to the likeliest token")
    seed: int | None = Field(None, description="same seed, same text")
    stop: str | _List[str] | None = Field(None, description="up to 4 strings that end the text, not part of it")
    stop_token_ids: _List[int] | None = None
    ignore_eos: bool | None = False
    return_token_ids: bool | None = Field(False, description="add token_ids to each choice")
    timeout: float | None = Field(None, description="seconds after which the request fails with 504")
    cache_salt: str | None = Field(None, description="prompts share cached blocks only within one salt")
    user: str | None = None
    priority: int | None = Field(None, description="lower is more urgent, default 0; no more than the tenant may have")
    n: int | None = Field(None, description="continuations of each prompt; default 1")
    min_tokens: int | None = Field(None, description="end of text, stop tokens and stop strings count only after these")
    presence_penalty: float | None = Field(None, description="-2 to 2, over the output's tokens")
    frequency_penalty: float | None = Field(None, description="-2 to 2, over the output's tokens")
    repetition_penalty: float | None = Field(None, description="above 0, to 10, over prompt and output; 1 is off")
    logit_bias: dict[str, float] | None = Field(
        None, description="token id → -100 to 100, added to its logit", max_length=MAX_LOGIT_BIAS
    )
    prompt_logprobs: int | None = Field(None, description="0 to 20: as logprobs, of the prompt's tokens")
    include_stop_str_in_output: bool | None = Field(False, description="keep the stop string that ended the text")

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    suffix: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell beside each token; None: no logprobs."""
        return None

    @property
    def num_shown(self) -> int:
        """Choices a prompt in the answer."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_supported(self) -> None:
        """Raises INVALID_REQUEST naming the first field that asks for what is not served."""
        for field in self.model_fields_set & _NEUTRAL.keys():
            value = getattr(self, field)
            if field not in self.served_fields and value is not None and not _NEUTRAL[field](value):
                raise invalid(f"`{field}` = {str(value)[:80]} is not supported: leave it out", field)
        if self.stream_options is not None and not self.stream:
            raise invalid("`stream_options` is only allowed with `stream`: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("`prompt_logprobs` is not told in a stream: leave `stream` out", "prompt_logprobs")

    def asked_sampling(self) -> AskedSampling:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return AskedSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias or {}),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            n=self.n,
            include_stop=bool(self.include_stop_str_in_output),
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions. prompt: a string, token ids, or a list of either (one choice each)."""

    served_fields = frozenset({"best_of", "echo"})

    prompt: Any = Field(description="string, list of strings, token ids, or list of lists of token ids")
    logprobs: int | None = Field(None, description="0 to 5: each token's logprob, and so many likeliest tokens")
    echo: bool | None = Field(False, description="the text begins with the prompt")
    best_of: int | None = Field(None, description="continuations of which the n likeliest are shown")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check_supported(self) -> None:
        super().check_supported()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_COMPLETION_LOGPROBS:
            message = f"`logprobs` must be from 0 to {MAX_COMPLETION_LOGPROBS}, found {self.logprobs}"
            raise invalid(message, "logprobs")
        if self.stream and (self.best_of or 1) > self.num_shown:
            raise invalid("`best_of` above `n` can't be streamed: the best is known at the end", "best_of")
        if self.stream and self.echo and self.logprobs is not None:
            raise invalid("`echo` with `logprobs` is not told in a stream: leave `stream` out", "echo")

    def asked_sampling(self) -> AskedSampling:
        asked = replace(super().asked_sampling(), best_of=self.best_of)
        if self.echo and self.logprobs is not None and asked.prompt_logprobs is None:
            return replace(asked, prompt_logprobs=self.logprobs)
        return asked

    def prompts(self) -> list[Prompt]:
        """At least one. Raises INVALID_REQUEST naming `prompt`."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [TextPrompt(prompt)]
        if not isinstance(prompt, list):
            raise invalid(f"`prompt` must be a string or a list, found {_json_type(prompt)}", "prompt")
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [TokenPrompt(prompt)]
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"`prompt` has {len(prompt)} items; at most {MAX_PROMPTS} prompts are allowed", "prompt")
        if kinds == {str}:
            return [TextPrompt(text) for text in prompt]
        if kinds == {list}:
            for index, token_ids in enumerate(prompt):
                if set(map(type, token_ids)) != {int}:
                    raise invalid(f"`prompt[{index}]` must be a non-empty list of token ids", f"prompt[{index}]")
            return [TokenPrompt(token_ids) for token_ids in prompt]
        if not kinds:
            raise invalid("`prompt` is empty: there is nothing to continue", "prompt")
        raise invalid("`prompt` must hold strings only, token ids only, or lists of token ids only", "prompt")


class ContentPart(_Body):
    type: str
    text: str | None = None


class ChatMessage(_Body):
    role: str
    content: str | Annotated[_List[ContentPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[_List[ChatMessage], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, description="as max_tokens")
    logprobs: bool | None = Field(False, description="tell each token's logprob")
    top_logprobs: int | None = Field(None, description="0 to 20 likeliest tokens at each place; needs logprobs")
    best_of: Any = None
    echo: Any = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_supported(self) -> None:
        super().check_supported()
        if self.top_logprobs and not self.logprobs:
            raise invalid("`top_logprobs` is only allowed with `logprobs`: true", "top_logprobs")

    def prompt(self) -> ChatPrompt:
        """Raises INVALID_REQUEST naming the message at fault."""
        if not self.messages:
            raise invalid("`messages` is empty: there is nothing to answer", "messages")
        return ChatPrompt([_message(i, message) for i, message in enumerate(self.messages)])

    def asked_sampling(self) -> AskedSampling:
        asked = replace(super().asked_sampling(), logprobs_field="top_logprobs")
        bound = self.max_completion_tokens
        if bound is None:
            return asked
        if asked.max_tokens not in (None, bound):
            message = f"`max_tokens` ({asked.max_tokens}) and `max_completion_tokens` ({bound}) differ: give one"
            raise invalid(message, "max_completion_tokens")
        return replace(asked, max_tokens=bound, max_tokens_field="max_completion_tokens")


B = TypeVar("B", bound=GenerationBody)


def parse_body(kind: type[B], data: bytes) -> B:
    """Raises INVALID_REQUEST for broken JSON, wrong types and fields that are not served."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _to_baton_error(error) from None
    body.check_supported()
    return body


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """By token id. Raises INVALID_REQUEST for a key that is none."""
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_ID_DIGITS):
            raise invalid(f"`logit_bias` has the key {key[:20]!r}: a token id is needed", "logit_bias")
    return {int(key): value for key, value in bias.items()}


def _message(index: int, message: ChatMessage) -> Mapping[str, str]:
    where = f"messages[{index}]"
    if message.content is None:
        raise invalid(f"`{where}.content` is missing", f"{where}.content")
    content = message.content if isinstance(message.content, str) else _joined_text(message.content, where)
    rendered = {"role": message.role, "content": content}
    return rendered if message.name is None else {**rendered, "name": message.name}


def _joined_text(parts: list[ContentPart], where: str) -> str:
    for index, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            param = f"{where}.content[{index}]"
            raise invalid(f"`{param}` is of type {part.type[:40]!r}; this model reads only text parts", param)
    return "".join(part.text or "" for part in parts)


def _to_baton_error(error: ValidationError) -> BatonError:
    """One complaint, in one line."""
    complaints = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union every member complains; the one that came furthest is what the client meant.
    first = max(complaints, key=lambda complaint: len(complaint["loc"]))
    message = " ".join(first["msg"].split())
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {message.removeprefix('Invalid JSON: ')}")
    param = _field_path(first["loc"])
    if not param:
        return invalid("the body must be a JSON object")
    if first["type"] == "missing":
        return invalid(f"`{param}` is required", param)
    return invalid(f"`{param}`: {message[0].lower()}{message[1:]}", param)


def _field_path(loc: tuple[int | str, ...]) -> str:
    """messages[0].content, without pydantic's tags for the members of a union ("str", "list[str]")."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "list"):
            path += f".{part}" if path else part
    return path


def _json_type(value: Any) -> str:
    return {bool: "a boolean", int: "a number", float: "a number", dict: "an object"}.get(type(value), "null")
