"""Routers and workers as processes of their own, started, killed, stopped and started again one by one.

`baton serve` restarts what dies; here whoever breaks things decides when they come back. All are killed by the kernel
when this process ends. Logs are JSON lines; what a part says there tells when it is ready.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from redis import Redis

from common.die_with_parent import command as die_with_parent
from common.registry import Role, WorkerRecord, decode_record, worker_key

START_DEADLINE_S: Final = 120.0
STOP_DEADLINE_S: Final = 15.0
_POLL_S: Final = 0.02
_READY: Final = {"router": "router is ready", "prefill": "ready", "decode": "ready"}


@dataclass
class Part:
    """One process, or the place of one that died. wrapper: what its command is prefixed with (`ip netns exec NAME`)."""

    name: str
    role: str
    settings: Mapping[str, Any]
    log: Path
    module: str = "deploy.cli"
    wrapper: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    log_offset: int = 0

    @property
    def pid(self) -> int:
        """Raises RuntimeError where it does not run."""
        if self.process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self.process.pid

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Fleet:
    """Owns the processes; `close` ends them. shared: settings of every part. For one thread: with it, they all end."""

    folder: Path
    redis_url: str
    cluster: str
    shared: Mapping[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)

    def add(self, role: str, name: str, *, module: str = "deploy.cli", wrapper: Sequence[str] = (), **own: Any) -> Part:
        """Start it; does not wait."""
        identity = {} if role == "router" else {"worker_id": name}
        base = {"redis_url": self.redis_url, "cluster": self.cluster, "log_format": "json"}
        settings = {**base, **self.shared, **identity, **own}
        part = Part(name, role, settings, self.folder / f"{name}.log", module, wrapper)
        self.parts[name] = part
        self.start(name)
        return part

    def start(self, name: str) -> None:
        """Again, where it died."""
        part = self.parts[name]
        words = [word for key, value in part.settings.items() for word in ("--set", f"{key}={value}")]
        command = [*part.wrapper, sys.executable, "-P", "-m", part.module, part.role, *words]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        clean["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        part.log_offset = part.log.stat().st_size if part.log.exists() else 0
        with part.log.open("ab") as log:
            part.process = subprocess.Popen(die_with_parent(command), stdout=log, stderr=log, env=clean)

    def wait_ready(self, *names: str) -> None:
        """All, where none is named. Raises RuntimeError with the log's end where one dies, or is not in time."""
        deadline = time.monotonic() + START_DEADLINE_S
        for name in names or self.parts:
            part = self.parts[name]
            while not self.has_logged(name, _READY[part.role]):
                if not part.is_up or time.monotonic() > deadline:
                    raise RuntimeError(f"{name} does not come up:\n{self.log_tail(name)}")
                time.sleep(_POLL_S)

    def has_logged(self, name: str, event: str) -> bool:
        return any(entry.get("event") == event for entry in self.logged(name))

    def logged(self, name: str) -> list[dict[str, Any]]:
        """All entries of its log since its last start."""
        part = self.parts[name]
        with part.log.open("rb") as log:
            log.seek(part.log_offset)
            return _entries(log.read())

    def log_tail(self, name: str) -> str:
        return self.parts[name].log.read_text(errors="replace")[-3000:]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Of the process itself: the wrappers replace themselves by it. A no-op where it is gone."""
        part = self.parts[name]
        if part.is_up:
            os.kill(part.pid, number)

    def kill(self, name: str) -> int:
        """SIGKILL, and reap. Returns the exit code."""
        self.signal(name, signal.SIGKILL)
        return self.wait_ended(name)

    def wait_ended(self, name: str) -> int:
        part = self.parts[name]
        if part.process is None:
            raise RuntimeError(f"{name} does not run")
        return part.process.wait(STOP_DEADLINE_S)

    def record(self, name: str) -> WorkerRecord | None:
        """As the registry has it now."""
        with Redis.from_url(self.redis_url) as client:
            value = client.get(worker_key(self.cluster, name))
        return decode_record(value) if isinstance(value, bytes) else None

    def workers(self, role: Role | None = None) -> list[str]:
        return [p.name for p in self.parts.values() if p.role != "router" and role in (None, p.role)]

    def close(self) -> None:
        """Kill all."""
        for part in self.parts.values():
            if part.is_up:
                os.kill(part.pid, signal.SIGKILL)
        for part in self.parts.values():
            if part.process is not None:
                part.process.wait(STOP_DEADLINE_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _entries(text: bytes) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        if line.startswith(b"{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # half written
    return found
