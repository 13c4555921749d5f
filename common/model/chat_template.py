"""From chat messages to the prompt's text, by the Jinja template that a model folder brings. No torch.

Rendered as transformers does it (the de facto specification): an immutable sandbox, trimmed blocks, loop controls, and
`raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, and the special tokens by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import StartupError, invalid
from common.model.config_keys import read_json_object

_TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_TOKEN_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """The chat template of a Hugging Face folder: chat_template.jinja, else tokenizer_config.json's. Thread-safe.

    Raises StartupError (one line, naming the file) if the template doesn't parse. A folder without one is fine until
    somebody chats.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config_path = folder / _CONFIG_FILE
        config = read_json_object(config_path) if config_path.exists() else {}
        template_path = folder / _TEMPLATE_FILE
        source = template_path.read_text(encoding="utf-8") if template_path.exists() else _of_config(config)
        self._tokens = _special_tokens(config)
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            origin = template_path if template_path.exists() else config_path
            raise StartupError(f"the chat template in {origin} doesn't parse: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text, special tokens spelt out: encode it with add_special_tokens=False.

        messages: plain JSON values; keys whose value is None count as absent. Raises BatonError (invalid request,
        param "messages") if there are none, the model has no template, or the template refuses them.
        """
        if self._template is None:
            raise invalid(f"the model {self._folder.name!r} has no chat template: use /v1/completions", "messages")
        if not messages:
            raise invalid("messages must not be empty", "messages")
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                self._tokens, messages=present, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program: anything can come out of it
            reason = " ".join(str(error).split())
            raise invalid(f"the model's chat template doesn't take these messages: {reason}", "messages") from None


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}`, by which training marks the assistant's words, renders its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _of_config(config: Mapping[str, Any]) -> str | None:
    """A string, or a list of named templates of which "default" is the one for chats."""
    value = config.get("chat_template")
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Newer files hold a token as a string, older ones as an object."""
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            tokens[name] = token
    return tokens
