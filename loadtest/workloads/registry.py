"""Workloads by name, and the spelling `name:key=value,key=value` that the command line uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from loadtest.errors import BenchError
from loadtest.workloads.replay import TraceReplay
from loadtest.workloads.session import Workload
from loadtest.workloads.shared import Chat, Rag, SharedPrefix
from loadtest.workloads.synthetic import Fixed, Mixed, ShareGpt

WORKLOADS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        "fixed": Fixed,
        "sharegpt": ShareGpt,
        "mixed": Mixed,
        "shared-prefix": SharedPrefix,
        "rag": Rag,
        "chat": Chat,
        "trace": TraceReplay,
    }
)


def parse_workload(spec: str) -> Workload:
    """`fixed:input=128,output=64` → Fixed(128, 64). Raises BenchError naming the key and what exists."""
    name, _, rest = spec.partition(":")
    kind = WORKLOADS.get(name)
    if kind is None:
        raise BenchError(f"workload {name!r} does not exist; there are {', '.join(WORKLOADS)}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if name == "trace" and rest and "=" not in rest:
        rest = f"path={rest}"
    values: dict[str, object] = {}
    for item in filter(None, rest.split(",")):
        key, equals, text = item.partition("=")
        if key not in fields or not equals:
            raise BenchError(f"workload {name}: {item!r} is not one of its settings: {', '.join(fields)} (key=value)")
        # Field defaults tell the type: annotations are strings here.
        convert: Callable[[str], object] = type(fields[key].default)
        try:
            values[key] = convert(text)
        except ValueError:
            raise BenchError(f"workload {name}: {key}={text} is not {type(fields[key].default).__name__}") from None
    workload: Workload = kind(**values)
    return workload


def describe_workload(workload: Workload) -> dict[str, object]:
    """Name and settings, for the report."""
    name = next(n for n, kind in WORKLOADS.items() if isinstance(workload, kind))
    return {"name": name, **dataclasses.asdict(workload)}  # type: ignore[call-overload]


def workload_help() -> str:
    """One line a workload: its name, its settings with defaults."""
    lines = []
    for name, kind in WORKLOADS.items():
        settings = ",".join(f"{f.name}={f.default}" for f in dataclasses.fields(kind))
        lines.append(f"{name}:{settings}")
    return "\n\n".join(lines)
