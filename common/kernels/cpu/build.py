"""Compiles the native executor for this machine's CPU, once: a few seconds, then a cached file.

    <cache>/baton/kernels/executor-<isa>-<key>.so      key: hash of sources, flags and compiler version
    <package>/prebuilt/executor-<isa>-<key>.so         key: hash of sources and flags; made by prebuild, looked up first

Two processes that start together take turns at a file lock; the result appears by an atomic rename, so that a process
which is killed while compiling leaves nothing that another would load.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

SOURCE_DIR: Final = Path(__file__).parent / "native"
# Filled where an image is made, so that what runs in it needs no compiler; elsewhere there is no such folder.
PREBUILT_DIR: Final = Path(__file__).parent / "prebuilt"
_MAIN: Final = "baton_cpu.cpp"
_FLAGS: Final = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fvisibility=hidden")
_COMPILE_TIMEOUT_S: Final = 180.0
_LOCK_POLL_S: Final = 0.05


class NativeUnavailableError(Exception):
    """The native executor can't be had here; one line says why. Callers fall back to the torch reference."""


class CpuIsa(StrEnum):
    """Instruction sets that the executor is written for, best first."""

    AVX512_BF16 = "avx512_bf16"  # with VNNI, which every CPU that has BF16 has
    AVX512_VNNI = "avx512_vnni"
    AVX512 = "avx512"
    AVX2_VNNI = "avx2_vnni"
    AVX2 = "avx2"


_NEEDED: Final[dict[CpuIsa, frozenset[str]]] = {
    CpuIsa.AVX512_BF16: frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma")),
    CpuIsa.AVX512_VNNI: frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma")),
    CpuIsa.AVX512: frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")),
    CpuIsa.AVX2_VNNI: frozenset(("avx2", "avx_vnni", "fma", "f16c", "bmi2")),
    CpuIsa.AVX2: frozenset(("avx2", "fma", "f16c", "bmi2")),
}
_ISA_FLAGS: Final[dict[CpuIsa, tuple[str, ...]]] = {
    CpuIsa.AVX512_BF16: ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"),
    CpuIsa.AVX512_VNNI: ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
    CpuIsa.AVX512: ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    CpuIsa.AVX2_VNNI: ("-march=x86-64-v3", "-mavxvnni"),
    CpuIsa.AVX2: ("-march=x86-64-v3",),
}


def supported_isas(cpu_flags: frozenset[str]) -> tuple[CpuIsa, ...]:
    """Those that a CPU with these /proc/cpuinfo flags can run, best first. Pure."""
    return tuple(isa for isa in CpuIsa if _NEEDED[isa] <= cpu_flags)


def read_cpu_flags() -> frozenset[str]:
    """The first CPU's flags; empty where there is no such file or line (another system or architecture)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def best_isa() -> CpuIsa:
    """Raises NativeUnavailableError where the CPU has none of them."""
    isas = supported_isas(read_cpu_flags())
    if not isas:
        raise NativeUnavailableError("this CPU has no AVX2 with FMA")
    return isas[0]


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/baton/kernels, else ~/.cache/baton/kernels."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "baton" / "kernels"


def build_library(isa: CpuIsa, cache_dir: Path) -> Path:
    """The shared library for `isa`: the prebuilt one of these very sources, else the cache's, else compiled now.

    Blocks: seconds, or another's compilation.
    Raises NativeUnavailableError: no compiler, it fails, the cache can't be written.
    """
    prebuilt = _prebuilt(isa)
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler()
    flags = _flags(isa)
    target = cache_dir / f"executor-{isa}-{_key(flags, _version(compiler))}.so"
    if target.exists():
        return target
    _compile_into(target, compiler, flags)
    return target


def prebuild(isa: CpuIsa) -> Path:
    """Compile the library for `isa` into the package itself, whatever this machine's CPU. Raises as build_library."""
    target = _prebuilt(isa)
    _compile_into(target, _compiler(), _flags(isa))
    return target


def has_prebuilt(isa: CpuIsa) -> bool:
    """Whether `isa` needs no compiler here."""
    return _prebuilt(isa).exists()


def _prebuilt(isa: CpuIsa) -> Path:
    return PREBUILT_DIR / f"executor-{isa}-{_key(_flags(isa))}.so"


def _flags(isa: CpuIsa) -> tuple[str, ...]:
    return (*_FLAGS, *_ISA_FLAGS[isa])


def _compile_into(target: Path, compiler: str, flags: tuple[str, ...]) -> None:
    cache_dir = target.parent
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / ".lock"):
            if not target.exists():
                _compile(compiler, flags, target)
    except OSError as error:
        raise NativeUnavailableError(f"can't write to {cache_dir}: {error.strerror or error}") from None


def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise NativeUnavailableError(f"no C++ compiler: {name} is not on the PATH (Debian: apt install g++)")
    return path


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return done.stdout


def _key(flags: tuple[str, ...], compiler_version: str = "") -> str:
    digest = hashlib.sha256(repr((flags, compiler_version)).encode())
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=".compiling-", suffix=".so")
    os.close(handle)
    command = [compiler, *flags, "-o", partial, str(SOURCE_DIR / _MAIN)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S)
        if done.returncode != 0:
            error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise NativeUnavailableError(f"{compiler} failed: {error}")
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(f"{compiler} took more than {_COMPILE_TIMEOUT_S:.0f} s") from None
    finally:
        Path(partial).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock, waited for no longer than a compilation may take."""
    deadline = time.monotonic() + _COMPILE_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NativeUnavailableError(f"another process holds {path} for too long") from None
                time.sleep(_LOCK_POLL_S)
        yield
