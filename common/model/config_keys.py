"""Typed reads of a JSON file that a model folder holds; every complaint is one line that names the file and the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from common.errors import StartupError


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises StartupError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"can't read {path}: {error.strerror}; a Hugging Face model folder has it") from None
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object")
    return value


class JsonKeys:
    """Typed reads of one JSON object; every complaint names key and file. A null counts as absent."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def bad(self, name: str, what: str) -> StartupError:
        return StartupError(f"{self.path}: {name!r} {what}, found {self.values.get(name)!r}")

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.bad(name, "must be a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.bad(name, "must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.bad(name, "must be true or false")

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.bad(name, "must be a token id or a list of them")
        return tuple(ids)
