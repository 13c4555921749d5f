"""Checks before anything starts: ports, memory, the model folder. Each failure is one line that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
from pathlib import Path
from typing import Final

import psutil
from redis.exceptions import RedisError

from common.errors import StartupError
from common.kernels.cpu.build import CpuIsa, has_prebuilt
from common.redis_client import RedisTimeouts, connect, place_of
from deploy.cluster_plan import MemoryNeed

_CGROUP: Final = Path("/sys/fs/cgroup")
REDIS_TIMEOUT_S: Final = 3.0
_ANY_HOST: Final = frozenset({"", "0.0.0.0", "::"})


def check_port(host: str, port: int, option: str) -> int:
    """The port to listen on: `port`, or a free one for 0. Raises StartupError if it can't be had; option: its name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise StartupError(_port_problem(error, host, port, option)) from None
        return int(probe.getsockname()[1])


def choose_grpc_port(host: str, wanted: int, http_port: int) -> int:
    """The gRPC port: as wanted, else the one after HTTP's, else any free one."""
    if wanted and wanted == http_port:
        raise StartupError(f"--port and --grpc-port are both {wanted}: give each a number of its own")
    if wanted:
        return check_port(host, wanted, "--grpc-port")
    with contextlib.suppress(StartupError, OverflowError):
        return check_port(host, http_port + 1, "--grpc-port")
    return check_port(host, 0, "--grpc-port")


def check_redis(url: str) -> None:
    """Raises StartupError where no Redis answers at `url`; the message holds no password."""
    client = connect(url, RedisTimeouts(connect_s=REDIS_TIMEOUT_S, answer_s=REDIS_TIMEOUT_S, num_retries=0))

    async def ping() -> None:
        try:
            await client.get("baton")
        finally:
            await client.aclose()

    try:
        asyncio.run(ping())
    except (RedisError, OSError) as error:
        raise StartupError(
            f"no Redis at {place_of(url)}: {error}; start it, or leave redis_url out: `baton serve` starts its own"
        ) from None


def check_memory(need: MemoryNeed, available_bytes: int) -> None:
    """Raises StartupError where the workers would not fit."""
    if need.total_bytes <= available_bytes:
        return
    raise StartupError(
        f"too little memory: {need.num_workers} workers need about {_gib(need.total_bytes)} "
        f"(each {_gib(need.weights_bytes)} of weights, {_gib(need.kv_cache_bytes)} of KV cache, "
        f"{_gib(need.landing_bytes)} for transfers, and its runtime), "
        f"{_gib(available_bytes)} is free: end other programs, start fewer workers, "
        f"or set a smaller kv_cache_bytes (--set kv_cache_bytes={64 << 20})"
    )


def available_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """What this process may still allocate: the machine's, or less where a container's limit is nearer."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        limit = int((cgroup / "memory.max").read_text())
        available = min(available, limit - int((cgroup / "memory.current").read_text()))
    return max(0, available)


def compiler_note(kernels: str) -> str:
    """One line for a machine without a C++ compiler, where the native kernels are wanted and not prebuilt; else ""."""
    compiler = os.environ.get("CXX") or "g++"
    if kernels == "torch" or shutil.which(compiler) or any(map(has_prebuilt, CpuIsa)):
        return ""
    return f"no C++ compiler ({compiler}), so torch computes, several times slower: apt install g++ (Debian) mends it"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _port_problem(error: OSError, host: str, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use{_port_owner(port)}: end that program, or choose another with {option}"
    if error.errno == errno.EACCES:
        return f"no right to listen on port {port}: choose one above 1023 with {option}"
    return f"can't listen on {host}:{port}: {error.strerror}: check --host and {option}"


def _port_owner(port: int) -> str:
    """ " by python3 (pid 7)", or "" where it can't be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def browsable(host: str) -> str:
    """The host to put into a URL for a client on this machine."""
    if host in _ANY_HOST:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
