"""Removes from the running interpreter's site-packages what a container never uses; prints how much that was.

Tests, C headers, static libraries and compiled modules go, and files that a wheel holds twice (a library under each of
its names) become links. Run once, while an image is made.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

# Relative to site-packages. Of torch: its C++ API and its test programs; torch.testing stays, torch itself
# imports it. hf_xet comes with tokenizers and downloads from a hub, which Baton never does.
UNUSED: Final = (
    "**/__pycache__",
    "**/tests",
    "**/*.a",
    "**/*.la",
    "**/*.pyi",
    "torch/bin/*test*",
    "torch/bin/protoc*",
    "torch/include",
    "torch/share",
    "torch/test",
    "torch/lib/*test*",
    "libucx/bin",
    "libucx/include",
    "libucx/share",
    "libucx/lib/cmake",
    "libucx/lib/pkgconfig",
    "libucx/lib/ucx/*perftest*",
    "hf_xet",
    "hf_xet-*",
    "setuptools",
    "setuptools-*",
    "_distutils_hack",
    "distutils-precedence.pth",
    "pkg_resources",
)


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    before = size(packages)
    remove_unused(packages)
    link_twins(packages)
    after = size(packages)
    sys.stdout.write(f"{packages}: {before >> 20} MiB, now {after >> 20} MiB\n")


def remove_unused(packages: Path) -> None:
    for pattern in UNUSED:
        for path in list(packages.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def link_twins(packages: Path) -> None:
    """A shared library that lies beside an equal one becomes a link to it; loaders look in the same folder anyway."""
    seen: dict[tuple[Path, str], Path] = {}
    for path in sorted(packages.rglob("*.so*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        twin = seen.setdefault((path.parent, digest), path)
        if twin is not path:
            path.unlink()
            path.symlink_to(twin.name)


def size(folder: Path) -> int:
    """Bytes of the regular files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
