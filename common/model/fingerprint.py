"""A model folder's fingerprint: equal on two workers means that their KV is exchangeable. No torch: routers call it.

Hashing all weights would take seconds at each start; a sample tells checkpoints apart as well, since a retrained or
converted model differs in practically every 64 KiB. Sampled of each safetensors file:

    |header|w     w        w        w        w        w      w|     32 windows of 64 KiB, evenly spread, first and last
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Final

from common.errors import StartupError
from common.model.quantization import Quantization

_WINDOW_BYTES: Final = 64 << 10
_NUM_WINDOWS: Final = 32
_MAX_HEADER_BYTES: Final = 100 << 20  # as the safetensors format limits it
_WHOLE_FILES: Final = ("config.json", "tokenizer.json")


def model_fingerprint(folder: Path, quantization: Quantization = "none") -> str:
    """32 hex digits, the same in every process and on every host; with "+int8" or "+int4" behind them for a model that
    is run so, whose KV is another's. Not a signature: it finds mix-ups, not forgers.

    Raises StartupError if config.json, tokenizer.json or the weights are missing or unreadable.
    """
    digest = blake2b(digest_size=16, person=b"baton-model-v1")
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise StartupError(f"no *.safetensors file in {folder}: give a Hugging Face model folder")
    try:
        for name in _WHOLE_FILES:
            data = (folder / name).read_bytes()
            digest.update(f"{name}:{len(data)}:".encode() + data)
        for path in paths:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}:".encode())
            with path.open("rb") as file:
                for window in _windows(file, size):
                    digest.update(window)
    except OSError as error:
        raise StartupError(f"can't read {error.filename}: {error.strerror}") from None
    return digest.hexdigest() if quantization == "none" else f"{digest.hexdigest()}+{quantization}"


def _windows(file: BinaryIO, size: int) -> list[bytes]:
    """The header, then the sampled windows of the data."""
    prefix = file.read(8)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise StartupError(f"{file.name} is truncated or corrupt: its safetensors header is cut off")
    windows = [file.read(header_bytes)]
    data_start = 8 + header_bytes
    last_start = max(data_start, size - _WINDOW_BYTES)
    starts = {data_start + (last_start - data_start) * i // (_NUM_WINDOWS - 1) for i in range(_NUM_WINDOWS)}
    for start in sorted(starts):
        file.seek(start)
        windows.append(file.read(_WINDOW_BYTES))
    return windows
