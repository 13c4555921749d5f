"""Regenerate the Python code beside the .proto files: `python scripts/gen_protos.py [--check]`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "protos"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> None:
    sources = sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.proto"))
    outs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    outs += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    # The plug-ins lie beside the interpreter, which need not be on the caller's PATH.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outs, *sources]
    subprocess.run(command, check=True, cwd=ROOT, env=env)


def main() -> int:
    if "--check" not in sys.argv:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = [p for p in Path(tmp).rglob("*") if p.name.endswith(SUFFIXES)]
        stale = [p for p in fresh if (ROOT / p.relative_to(tmp)).read_bytes() != p.read_bytes()]
    for path in stale:
        print(f"stale generated code: protos/{path.relative_to(tmp)}; run python scripts/gen_protos.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
