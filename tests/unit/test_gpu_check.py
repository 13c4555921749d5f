"""The script of GPU machines runs through on a CPU; every kernel compiles for a GPU that isn't here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_a_dry_run_checks_every_kernel_and_prints_the_table_last() -> None:
    result = run("-m", "loadtest.gpu_check", "--dry-run", "--no-cluster")
    assert result.returncode == 0, result.stdout + result.stderr
    table = result.stdout.split("| kernel |")[1].splitlines()
    names = [line.split("|")[1].strip() for line in table[2:] if line.startswith("|")]
    for part in ("RMSNorm", "SiLU", "RoPE", "gather", "decode", "chunk", "experts", "sampling"):
        assert any(part in name for name in names), part
    assert result.stdout.splitlines()[-1].startswith("0 failed")


def test_every_kernel_compiles_for_sm_90_without_a_gpu() -> None:
    result = run("scripts/kernel_table.py", "--arch", "90")
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = {line.split()[0] for line in result.stdout.splitlines() if "_kernel" in line}
    sources = (ROOT / "common" / "kernels" / "triton").glob("*.py")
    defined = {word.split("(")[0] for path in sources for word in path.read_text().split() if "_kernel(" in word}
    assert kernels == {name for name in defined if name.endswith("_kernel")}
