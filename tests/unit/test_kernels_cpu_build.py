"""The executor is compiled once per source, flags and compiler, for a CPU that can run it; failures say one line."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from common.kernels.cpu import build
from common.kernels.cpu.build import CpuIsa, NativeUnavailableError, build_library, supported_isas
from common.kernels.cpu.library import load_library

AVX512 = frozenset(("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq"))


def fake_compiler(folder: Path, body: str) -> Path:
    """A compiler that notes each compilation in `folder`/calls; $out is where it should write."""
    path = folder / "fake-c++"
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n'
        f"echo compiled >> {folder}/calls\n"
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n' + body
    )
    path.chmod(0o755)
    return path


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (AVX512 | {"avx512_bf16", "avx512_vnni"}, CpuIsa.AVX512_BF16),
        (AVX512 | {"avx512_vnni"}, CpuIsa.AVX512_VNNI),
        (AVX512 | {"avx512_bf16"}, CpuIsa.AVX512),
        (AVX512, CpuIsa.AVX512),
        (AVX512 - {"avx512bw"}, CpuIsa.AVX2),
        (AVX512 - {"avx512bw"} | {"avx_vnni"}, CpuIsa.AVX2_VNNI),
        (frozenset(("avx2", "f16c", "bmi2")), None),
        (frozenset(), None),
    ],
)
def test_the_best_instruction_set_that_the_cpu_has(flags: frozenset[str], best: CpuIsa | None) -> None:
    assert next(iter(supported_isas(flags)), None) == best


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo library > $out\n")))
    first = build_library(CpuIsa.AVX2, tmp_path / "cache")
    assert build_library(CpuIsa.AVX2, tmp_path / "cache") == first
    assert first.read_text() == "library\n"
    assert calls(tmp_path) == 1
    assert build_library(CpuIsa.AVX512, tmp_path / "cache") != first
    assert calls(tmp_path) == 2


def test_changed_sources_are_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "baton_cpu.cpp").write_text("// one\n")
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo library > $out\n")))
    first = build_library(CpuIsa.AVX2, tmp_path / "cache")
    (sources / "baton_cpu.cpp").write_text("// two\n")
    assert build_library(CpuIsa.AVX2, tmp_path / "cache") != first


def test_those_who_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler does not end before all have asked: it waits for a pipe that the test writes to."""
    gate = tmp_path / "gate"
    build.os.mkfifo(gate)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, f"cat {gate} > $out\n")))
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(build_library(CpuIsa.AVX2, tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    gate.write_text("library")
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert calls(tmp_path) == 1


def test_a_failed_compilation_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "CXX", str(fake_compiler(tmp_path, "echo half > $out; echo 'x.h:1: error: broken' >&2; exit 1\n"))
    )
    with pytest.raises(NativeUnavailableError, match=r"failed: x\.h:1: error: broken"):
        build_library(CpuIsa.AVX2, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailableError, match="no-such-compiler is not on the PATH"):
        build_library(CpuIsa.AVX2, tmp_path / "cache")


def test_an_unwritable_cache_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo library > $out\n")))
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(NativeUnavailableError, match="can't write to"):
        build_library(CpuIsa.AVX2, tmp_path / "cache")


def test_a_library_that_does_not_load_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo 'no ELF file' > $out\n")))
    with pytest.raises(NativeUnavailableError, match="can't load"):
        load_library(CpuIsa.AVX2, tmp_path / "cache")
