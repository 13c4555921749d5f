"""Command-line options made from the settings: a command names the settings that matter to it and gets them resolved.

    @app.command()
    @takes_settings("port", "model")
    def serve(settings: Settings, demo: bool = True) -> None: ...

makes `serve --port INT --model TEXT --config FILE --set KEY=VALUE … --demo/--no-demo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from common.config import Resolved, Settings, resolve_settings
from common.errors import StartupError


def takes_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: replaces the parameter `settings` (Settings, or Resolved where so annotated) by options.

    The options are those of the named settings, --config and --set; other parameters stay as they are.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        own = [p for p in signature(function).parameters.values() if p.name != "settings"]
        wants_origin = hints["settings"] is Resolved

        def command(**given: Any) -> None:
            own_values = {p.name: given.pop(p.name) for p in own}
            config: Path | None = given.pop("config")
            pairs = parse_pairs(given.pop("set_"))
            named = {key: value for key, value in given.items() if value is not None}
            resolved = resolve_settings({**pairs, **named}, config=config)
            function(settings=resolved if wants_origin else resolved.settings, **own_values)

        parameters = {name: _setting_option(name) for name in names}
        parameters["config"] = Annotated[
            Path | None, typer.Option("--config", metavar="FILE", help="TOML file of settings", show_default=False)
        ]
        parameters["set_"] = Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="any other setting; may be repeated", show_default=False),
        ]
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__annotations__ = {**parameters, **{p.name: hints[p.name] for p in own}}
        added = [Parameter(n, Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in parameters.items()]
        kept = [p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
        command.__signature__ = Signature([*added, *kept])  # type: ignore[attr-defined]
        return command

    return decorate


def parse_pairs(pairs: Iterable[str] | None) -> dict[str, str]:
    """KEY=VALUE words as a dict; dashes in keys count as underscores. Raises StartupError for a word without "="."""
    parsed: dict[str, str] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise StartupError(f"--set {pair}: write it as KEY=VALUE, e.g. --set max_running=16")
        parsed[key.strip().replace("-", "_")] = value
    return parsed


def default_text(name: str) -> str:
    """A setting's default as a person reads it; "" where there is none."""
    default = Settings.model_fields[name].default
    return "" if hasattr(default, "get_secret_value") else str(default)


def choices_of(name: str) -> tuple[str, ...]:
    """The words that a setting of fixed choices takes; () for any other."""
    return tuple(getattr(Settings.model_fields[name].annotation, "__args__", ()))


def _setting_option(name: str) -> Any:
    field = Settings.model_fields[name]
    default = f" [{default_text(name)}]" if default_text(name) else ""
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=_metavar(name),
        help=f"{field.description}{default}",
        show_default=False,
    )
    return Annotated[kind_of(name) | None, option]


def kind_of(name: str) -> type[int] | type[float] | type[str]:
    """What a setting's value is, as typed."""
    annotation = Settings.model_fields[name].annotation
    return int if annotation is int else float if annotation is float else str


def _metavar(name: str) -> str:
    if choices_of(name):
        return "|".join(choices_of(name))
    if name in ("model", "ucx_library"):
        return "DIR" if name == "model" else "FILE"
    return {int: "N", float: "SECONDS", str: "TEXT"}[kind_of(name)]
