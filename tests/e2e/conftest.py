"""Real clusters of real processes with the real model, one a topology, shared by all e2e tests of a session."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis

from common.die_with_parent import command as die_with_parent
from common.embedded_redis import EmbeddedRedis
from common.registry import WorkerRecord, decode_record, worker_key, workers_key

READY_DEADLINE_S = 180.0
CLUSTER = "e2e"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def poll_until(condition, what: str, deadline_s: float = 30.0):
    """First true value of `condition()`; a failure that says what was waited for, after the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(0.05)
    return value


@dataclass
class Cluster:
    """`baton serve` as a user starts it, on free ports, with a Redis that the test can look into."""

    url: str
    grpc_address: str
    process: subprocess.Popen
    redis_url: str
    log: Path

    def workers(self) -> list[WorkerRecord]:
        with redis.Redis.from_url(self.redis_url) as client:
            ids = sorted(client.smembers(workers_key(CLUSTER)))
            values = [client.get(worker_key(CLUSTER, worker_id.decode())) for worker_id in ids]
        return [decode_record(value) for value in values if value]

    def keys(self) -> list[str]:
        with redis.Redis.from_url(self.redis_url) as client:
            return sorted(key.decode() for key in client.keys("*"))

    def gauges(self, url: str) -> dict[str, float]:
        """Every sample of a Prometheus page, by its name with labels."""
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if x and x[0] != "#")}

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def start_cluster(tmp: Path, model_folder: Path, *extra: str, env: dict[str, str] | None = None) -> Iterator[Cluster]:
    port, grpc_port = free_port(), free_port()
    log = tmp / "serve.log"
    server = EmbeddedRedis()
    server.start()
    command = [
        sys.executable, "-m", "deploy.cli", "serve", "--port", str(port), "--grpc-port", str(grpc_port),
        "--model", str(model_folder), "--no-demo", "--set", f"redis_url={server.url}", "--set", f"cluster={CLUSTER}",
        "--set", "check_when_idle=true", "--set", "local_prefill_max_tokens=0",
        *extra,
    ]  # fmt: skip
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                die_with_parent(command), stdout=out, stderr=out, env={**os.environ, **(env or {})}
            )
        cluster = Cluster(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", process, server.url, log)
        try:
            poll_until(lambda: _ready(cluster), f"/ready; see {log}:\n{_tail(log)}", READY_DEADLINE_S)
            yield cluster
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        server.stop()


def _ready(cluster: Cluster) -> bool:
    if cluster.process.poll() is not None:
        pytest.fail(f"baton serve ended with {cluster.process.returncode}:\n{_tail(cluster.log)}")
    try:
        with urllib.request.urlopen(f"{cluster.url}/ready", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"


def post(url: str, body: dict, timeout: float = 120.0) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, model_folder) -> Iterator[Cluster]:
    """One prefill and one decode worker, float32."""
    yield from start_cluster(tmp_path_factory.mktemp("1p1d"), model_folder, "--dtype", "float32")


@pytest.fixture(scope="module")
def cluster_2p2d(tmp_path_factory, model_folder) -> Iterator[Cluster]:
    """Two prefill and two decode workers, float32, small pools."""
    yield from start_cluster(
        tmp_path_factory.mktemp("2p2d"), model_folder, "--dtype", "float32", "--prefill", "2", "--decode", "2",
        "--set", f"kv_cache_bytes={384 << 20}",
    )  # fmt: skip
