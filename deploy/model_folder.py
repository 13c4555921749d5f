"""The model that a command runs: named, or the default one, fetched on first use; checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError
from common.model.checkpoint import check_weights
from common.model.config import load_model_config, resolve_dtype
from deploy.model_fetch import fetch_default_model
from deploy.paths import baton_home


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """folder: absolute. stored_dtype: of the weights on disk, which take weights_file_bytes there."""

    folder: Path
    stored_dtype: str
    weights_file_bytes: int


def resolve_model(setting: str, progress: Callable[[str], None]) -> Path:
    """The absolute folder of the model `setting`; for "" the default one, fetched if need be. Raises StartupError."""
    if not setting:
        return fetch_default_model(baton_home(), progress)
    folder = Path(setting).expanduser().absolute()
    if not folder.is_dir():
        raise StartupError(f"no folder {folder}: --model takes a Hugging Face folder; without it, Baton fetches one")
    return folder


def check_model(folder: Path, dtype: str) -> ModelFacts:
    """Check config.json and the weight files' headers. Raises StartupError naming the file, and tensor, at fault."""
    config = load_model_config(folder)
    resolve_dtype(dtype, config)
    files = set(check_weights(folder, config).values())
    return ModelFacts(folder, config.stored_dtype, sum(path.stat().st_size for path in files))
