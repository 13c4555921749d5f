"""deploy/docker-compose.yml as a running cluster, and what the tests ask of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from openai import OpenAI

ROOT = Path(__file__).parents[2]
PROJECT = "baton-test"
MODEL = "SmolLM2-135M-Instruct"
ROUTERS = ("router-1", "router-2")
PREFILL = ("prefill-1", "prefill-2")
DECODE = ("decode-1", "decode-2")
PARTS = (*ROUTERS, *PREFILL, *DECODE)
COMMAND_TIMEOUT_S = 120.0

T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def poll_until(condition: Callable[[], T], what: str, deadline_s: float = 60.0) -> T:
    """First true value of `condition()`; a failure that says what was waited for, after the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(0.2)
    return value


@dataclass(frozen=True)
class ComposeCluster:
    """compose: `docker compose` or `podman-compose`, as words; engine: the program beneath. models: its folder."""

    compose: tuple[str, ...]
    engine: str
    models: Path
    http_ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in ROUTERS})
    grpc_ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in ROUTERS})

    def run_compose(self, *arguments: str, check: bool = True) -> None:
        files = ("deploy/docker-compose.yml", "tests/compose/docker-compose.test.yml")
        command = [*self.compose, "-p", PROJECT, *(word for file in files for word in ("-f", file)), "--profile", "cpu"]
        settings = {
            "MODEL_DIR": str(self.models),
            "REDIS_PASSWORD": "a1b2c3",
            "KV_CACHE_BYTES": str(256 << 20),
            "WORKER_THREADS": "1",
            "WORKER_MEMORY": "1500m",
            **{f"{name.upper().replace('-', '_')}_PORT": str(port) for name, port in self.http_ports.items()},
            **{f"{name.upper().replace('-', '_')}_GRPC_PORT": str(port) for name, port in self.grpc_ports.items()},
        }
        _run([*command, *arguments], check=check, env={**os.environ, **settings})

    def run_engine(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run([self.engine, *arguments], check=check)

    def container(self, service: str) -> str:
        """Its name. Compose implementations differ in how they make it; the labels are the same."""
        labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": service}
        filters = (word for key, value in labels.items() for word in ("--filter", f"label={key}={value}"))
        names = self.run_engine("ps", "-a", *filters, "--format", "{{.Names}}").stdout.split()
        assert len(names) == 1, f"containers of {service}: {names}"
        return names[0]

    def state(self, service: str) -> dict:
        """`inspect`'s State: Status, ExitCode, …"""
        return json.loads(self.run_engine("inspect", "--format", "{{json .State}}", self.container(service)).stdout)

    def exec(self, service: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run_engine("exec", self.container(service), *command, check=check)

    def logs(self, service: str) -> list[dict]:
        """The JSON lines of a part's log."""
        done = self.run_engine("logs", self.container(service))
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def events(self, service: str, event: str) -> list[dict]:
        return [line for line in self.logs(service) if line["event"] == event]

    def fetch(self, service: str, url: str) -> str:
        """GET from inside the cluster's network, where most ports are to be found."""
        code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
        return self.exec(service, "python", "-c", code, url).stdout

    def url(self, router: str) -> str:
        return f"http://127.0.0.1:{self.http_ports[router]}"

    def ready(self, router: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url(router)}/ready", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def workers(self, router: str) -> dict[str, float]:
        """How many of each role this router may send requests to."""
        with urllib.request.urlopen(f"{self.url(router)}/metrics", timeout=10) as response:
            samples = parse_metrics(response.read().decode())
        return {
            role: samples.get(f'baton_workers{{role="{role}",state="ready"}}', 0.0) for role in ("prefill", "decode")
        }

    def all_connected(self) -> bool:
        everybody = {"prefill": float(len(PREFILL)), "decode": float(len(DECODE))}
        return all(self.ready(name) and self.workers(name) == everybody for name in ROUTERS)

    def running_on(self, worker: str) -> float:
        """Requests that hold blocks on `worker`, as its own metrics say."""
        page = self.fetch("router-1", f"http://{worker}:9000/metrics")
        return parse_metrics(page)["baton_requests_running"]

    def client(self, router: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url(router)}/v1", api_key="none", max_retries=0, timeout=120.0)


def parse_metrics(page: str) -> dict[str, float]:
    """Every sample of a Prometheus page, by its name with labels."""
    lines = (line for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _run(command: list[str], *, check: bool, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done
