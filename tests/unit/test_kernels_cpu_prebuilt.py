"""A prebuilt executor is taken without a compiler, and only if it is of these very sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.kernels.cpu import build, prebuild
from common.kernels.cpu.build import CpuIsa, NativeUnavailableError, build_library, has_prebuilt


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folders in a temporary place, and a compiler that writes "library"."""
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "baton_cpu.cpp").write_text("// one\n")
    compiler = tmp_path / "fake-c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\necho library > $out\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "native")
    monkeypatch.setattr(build, "PREBUILT_DIR", tmp_path / "prebuilt")
    monkeypatch.setenv("CXX", str(compiler))
    return tmp_path


def test_every_instruction_set_is_built_and_found_without_a_compiler(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prebuild.main() == 0
    monkeypatch.setenv("CXX", "no-such-compiler")
    for isa in CpuIsa:
        assert has_prebuilt(isa)
        assert build_library(isa, package / "cache").parent == package / "prebuilt"
    assert not (package / "cache").exists()


def test_one_of_other_sources_is_not_taken(package: Path) -> None:
    build.prebuild(CpuIsa.AVX2)
    (package / "native" / "baton_cpu.cpp").write_text("// two\n")
    assert not has_prebuilt(CpuIsa.AVX2)
    assert build_library(CpuIsa.AVX2, package / "cache").parent == package / "cache"


def test_a_failure_is_said_and_ends_with_a_status(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert prebuild.main() == 1
    assert "no-such-compiler is not on the PATH" in capsys.readouterr().err
    with pytest.raises(NativeUnavailableError):
        build_library(CpuIsa.AVX2, package / "cache")
