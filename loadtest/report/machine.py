"""What machine a result was measured on: a number without it can't be compared."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import psutil


def describe_machine() -> dict[str, str | int | float]:
    """The client's machine; on loopback it is the server's too. No host or user name."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "baton": _version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version() -> str:
    try:
        return metadata.version("baton")
    except metadata.PackageNotFoundError:
        return ""
