"""Compiles the executor for every instruction set into the package: `python -m common.kernels.cpu.prebuild`.

For an image, whose containers have no compiler and run on CPUs that the machine which made it need not have.
"""

from __future__ import annotations

import sys

from common.kernels.cpu.build import CpuIsa, NativeUnavailableError, prebuild


def main() -> int:
    """Exit status."""
    for isa in CpuIsa:
        try:
            sys.stdout.write(f"{prebuild(isa)}\n")
        except NativeUnavailableError as error:
            sys.stderr.write(f"prebuild {isa}: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
