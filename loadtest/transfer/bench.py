"""Runs the peers of `baton bench transfer` case by case, in turns, and sets their rates side by side.

All figures of a case are taken within seconds of each other: a few rounds, each peer once a round, the median run of
each round, then the best round's for all (a machine with other work drifts; a ratio within one run drifts less).
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtest.errors import BenchError
from loadtest.transfer.cases import KIB, MIB, Case

ROOT: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 120.0
ANSWER_TIMEOUT_S: Final = 120.0
NETWORKS: Final = ("same host", "tcp")


@dataclass(frozen=True, slots=True)
class Peer:
    """command: without the interpreter; environ: added."""

    name: str
    python: str
    command: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """nixl_python: the interpreter of a venv with NIXL, or None. slots x slot_bytes: Baton's landing ring."""

    nixl_python: str | None
    nixl_package: str
    rounds: int
    budget_s: float
    slots: int
    slot_bytes: int


def peers_for(case: Case, network: str, options: TransferOptions) -> list[Peer]:
    text, python = case.to_json(), sys.executable
    ring = (str(options.slots), str(max(options.slot_bytes, case.block_bytes)))
    path = "same-host" if network == "same host" else "sockets"
    module = "loadtest.transfer."
    peers = [
        Peer("memcpy", python, (module + "memcpy_peer", text, "1")),
        Peer("memcpy, 2 threads", python, (module + "memcpy_peer", text, "2")),
        Peer("raw sockets", python, (module + "socket_peer", text)),
        Peer("Baton put", python, (module + "put_peer", text, path, *ring)),
        Peer("Baton", python, (module + "baton_peer", text, path, *ring)),
    ]
    if options.nixl_python is not None:
        environ = [("UCX_NET_DEVICES", "lo"), *([("UCX_TLS", "tcp")] if network == "tcp" else [])]
        command = (module + "nixl_peer", text, options.nixl_package)
        peers.insert(3, Peer("NIXL", options.nixl_python, command, tuple(environ)))
    return peers


class RunningPeer:
    """A peer's process; its standard output carries our JSON lines among others."""

    def __init__(self, peer: Peer, process: subprocess.Popen[bytes]) -> None:
        self.peer = peer
        self._process = process
        self._buffer = b""
        self.first: dict[str, Any] = {}

    def wait_for_first(self, key: str) -> None:
        """Its first line, which says that it is ready, or holds all that it has to say."""
        self.first = self._next(key, START_TIMEOUT_S)

    def measure(self, budget_s: float) -> list[float]:
        """Seconds of each run."""
        if self._process.stdin is None:
            raise BenchError(f"{self.peer.name} can't be told to run")
        self._process.stdin.write(f"{budget_s}\n".encode())
        self._process.stdin.flush()
        seconds: list[float] = self._next("seconds", budget_s + ANSWER_TIMEOUT_S)["seconds"]
        return seconds

    def _next(self, key: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (line := self._line(deadline)) is not None:
            if line.startswith(b'{"' + key.encode()):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise BenchError(f"{self.peer.name} ended, or was silent for {timeout_s:.0f} s: {' '.join(self.peer.command)}")

    def _line(self, deadline: float) -> bytes | None:
        out = self._process.stdout
        if out is None:
            return None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(out.fileno(), 1 << 16) if ready else b""
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


@contextmanager
def started(peer: Peer, key: str = "ready") -> Iterator[RunningPeer]:
    environ = {**os.environ, **dict(peer.environ), "PYTHONPATH": str(ROOT)}
    command = [peer.python, "-m", *peer.command]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, cwd=ROOT
    ) as process:
        try:
            running = RunningPeer(peer, process)
            running.wait_for_first(key)
            yield running
        finally:
            process.kill()


def measure_case(case: Case, network: str, options: TransferOptions) -> dict[str, Any]:
    """One row: GB/s by peer, ratios to memcpy, to sockets and to NIXL."""
    medians: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for peer in peers_for(case, network, options):
            # One at a time: each holds two pools of up to 1 GiB.
            with started(peer) as running:
                medians.setdefault(peer.name, []).append(statistics.median(running.measure(options.budget_s)))
    rates = {name: case.num_bytes / min(values) / 1e9 for name, values in medians.items()}
    return {"case": case.name, "network": network, "gb_per_s": rates, "ratios": ratios(rates)}


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Baton's two figures to each peer's; to the faster of the two memcpys."""
    limits: dict[str, float] = {
        "memcpy": max(rates[name] for name in rates if name.startswith("memcpy")),
        **{name: rates[name] for name in ("raw sockets", "NIXL") if name in rates},
    }
    return {f"{own} / {name}": rates[own] / rate for own in ("Baton put", "Baton") for name, rate in limits.items()}


def measure_interference(options: TransferOptions) -> dict[str, Any]:
    """Small transfers beside a large one, and an idle connection's share of a core (interference_peer.py)."""
    command = ("loadtest.transfer.interference_peer", "same-host", str(options.slots), str(options.slot_bytes))
    with started(Peer("interference", sys.executable, command), key="answer") as peer:
        answer: dict[str, Any] = peer.first["answer"]
        return answer


def ring_text(options: TransferOptions) -> str:
    size = options.slot_bytes
    return (
        f"{options.slots} slots of {size // MIB} MiB" if size >= MIB else f"{options.slots} slots of {size // KIB} KiB"
    )
