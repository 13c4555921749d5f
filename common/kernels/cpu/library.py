"""The executor's C ABI for Python: native/api.h, read by cffi in ABI mode. Calls release the GIL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import cffi

from common.kernels.cpu.build import (
    SOURCE_DIR,
    CpuIsa,
    NativeUnavailableError,
    best_isa,
    build_library,
    default_cache_dir,
)

ffi: Final = cffi.FFI()
ffi.cdef(re.sub(r"/\*.*?\*/", "", (SOURCE_DIR / "api.h").read_text(), flags=re.DOTALL))

_MESSAGES: Final[dict[str, str]] = {
    "BATON_NO_MEMORY": "no memory, or no thread, for the model or this step",
    "BATON_BAD_CONFIG": "the native executor can't run a model of these sizes",
    "BATON_BAD_SHAPE": "a weight's shape is not the config's",
    "BATON_BAD_TOKEN": "a token id is outside the vocabulary",
    "BATON_BAD_POSITION": "a position is negative",
    "BATON_BAD_SLOT": "a slot is outside the KV cache",
    "BATON_BAD_LENGTHS": "query_start, seq_lens and block_tables don't fit together",
    "BATON_BAD_BLOCK": "a block table names a block outside the KV cache",
    "BATON_BAD_ROW": "a logits row is outside the batch",
    "BATON_NOT_LOADED": "a weight was never loaded",
    "BATON_BAD_CPU": "a helper thread can't be pinned: this process may not run on one of the given CPUs",
}


def load_library(isa: CpuIsa | None = None, cache_dir: Path | None = None) -> Any:
    """The compiled executor for `isa` (default: the best this CPU has). Raises NativeUnavailableError."""
    path = build_library(isa or best_isa(), cache_dir or default_cache_dir())
    try:
        return ffi.dlopen(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"can't load {path}: {error}") from None


def check(lib: Any, code: int, where: str) -> None:
    """Raises MemoryError or ValueError, "where: what", for a code that isn't BATON_OK."""
    if code == lib.BATON_OK:
        return
    name = next((name for name in _MESSAGES if getattr(lib, name) == code), "")
    message = f"{where}: {_MESSAGES.get(name, f'unknown code {code}')}"
    raise MemoryError(message) if code == lib.BATON_NO_MEMORY else ValueError(message)
