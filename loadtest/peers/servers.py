"""How Baton and its peers are started to be measured: each with the options that its users would be told to take."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_MODEL_LEN = 8192
PROXY = Path(__file__).resolve().parent / "vllm_pd_proxy.py"
_NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


@dataclass(frozen=True, slots=True)
class Process:
    """environment: added to this process's own."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Server:
    """processes: what serves on the port that it is given. health: path that answers 200 once it does."""

    name: str
    processes: Callable[[int], Sequence[Process]]
    health: str = "/health"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def baton(model: Path, name: str = "Baton", *options: str) -> Server:
    command = [sys.executable, "-m", "deploy.cli", "serve", "--no-demo", "--model", str(model), "--dtype", "bfloat16"]
    return Server(name, lambda port: [Process([*command, "--port", str(port), *options])], "/ready")


def vllm(model: Path, environment: Path) -> Server:
    """One process, both phases, all cores."""
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    return Server("vLLM", lambda port: [_vllm_process(model, environment, port, cores)])


def vllm_disaggregated(model: Path, environment: Path) -> Server:
    """One prefill and one decode server, half of the cores each, joined by vLLM's NIXL connector and our proxy."""
    cores = os.cpu_count() or 2
    halves = (f"0-{cores // 2 - 1}", f"{cores // 2}-{cores - 1}")

    def processes(port: int) -> Sequence[Process]:
        ports = [free_port(), free_port()]
        proxy = [str(environment / "bin" / "python"), str(PROXY), str(port), *map(str, ports)]
        legs = [
            _vllm_process(
                model, environment, own, half, ("--kv-transfer-config", _NIXL),
                {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,shm,self"},
            )
            for own, half in zip(ports, halves, strict=True)
        ]  # fmt: skip
        return [*legs, Process(proxy)]

    return Server("vLLM 1P1D", processes)


def _vllm_process(
    model: Path,
    environment: Path,
    port: int,
    cores: str,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Process:
    preload = [*Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"), environment / "lib" / "libiomp5.so"]
    command = [
        str(environment / "bin" / "vllm"), "serve", str(model), "--dtype", "bfloat16",
        "--max-model-len", str(MAX_MODEL_LEN), "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    own = {
        "LD_PRELOAD": ":".join(map(str, preload)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
    return Process(command, own | dict(variables or {}))


def llama_cpp(program: Path, gguf: Path) -> Server:
    """llama-server with room for 16 sequences. It holds a bfloat16 GGUF."""
    threads = str(os.cpu_count() or 1)
    args = [str(program), "-m", str(gguf), "-t", threads, "-tb", threads, "-np", "16", "-c", str(16 * 5120)]
    return Server("llama.cpp", lambda port: [Process([*args, "--host", "127.0.0.1", "--port", str(port)])])
