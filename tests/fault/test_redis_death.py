"""Redis dies under real workers and a real router and comes back empty: no request fails, and none is slower than that.

BATON_REDIS_DOWN_S: how long it is away; 30 by hand, less in CI.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common.embedded_redis import redis_command, unix_url
from common.registry import worker_key
from tests.e2e.conftest import free_port, poll_until
from tests.fault.test_worker_processes import ROOT

DOWN_S = float(os.environ.get("BATON_REDIS_DOWN_S", "5"))


class OwnRedis:
    """Always the same socket, and nothing kept."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "r.sock"
        self.url = unix_url(self.socket)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [str(word) for word in redis_command(self.socket)]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        poll_until(self._answers, "Redis")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def has(self, *worker_ids: str) -> bool:
        with redis.Redis.from_url(self.url) as client:
            return client.exists(*(worker_key("default", each) for each in worker_ids)) == len(worker_ids)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    own = OwnRedis(tmp_path_factory.mktemp("r"))
    own.start()
    try:
        yield own
    finally:
        own.kill()


@pytest.fixture
def url(server: OwnRedis, tiny_model_folder: Path) -> Iterator[str]:
    port = free_port()
    common = {"model": tiny_model_folder, "redis_url": server.url, "kv_cache_bytes": 16 << 20, "num_threads": 1}
    parts = {
        "prefill": {"worker_id": "p0"},
        "decode": {"worker_id": "d0"},
        "router": {"port": port, "auth": "anonymous"},
    }
    processes = []
    try:
        for role, own in parts.items():
            words = [word for key, value in {**common, **own}.items() for word in ("--set", f"{key}={value}")]
            argv = [sys.executable, "-m", "deploy.cli", role, *words]
            processes.append(subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        address = f"http://127.0.0.1:{port}"
        poll_until(lambda: is_ready(address), "/ready", 120.0)
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


def is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ready", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def complete(address: str, model: str, number: int) -> list[int]:
    body = {"model": model, "prompt": [3 + number % 250] * 40, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


async def test_no_request_fails_while_redis_is_away_and_comes_back_empty(
    server: OwnRedis, url: str, tiny_model_folder: Path
) -> None:
    model = tiny_model_folder.name
    clean = {number: complete(url, model, number) for number in range(4)}
    over, answered = asyncio.Event(), 0

    async def client(number: int) -> None:
        nonlocal answered
        while not over.is_set():
            assert await asyncio.to_thread(complete, url, model, number) == clean[number]
            answered += 1

    async with asyncio.TaskGroup() as group:
        for number in clean:
            group.create_task(client(number))
        await asyncio.to_thread(server.kill)
        at_death = answered
        await asyncio.sleep(DOWN_S)
        assert answered > at_death
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(poll_until, lambda: server.has("p0", "d0"), "both workers in the registry")
        at_return = answered
        while answered < at_return + len(clean):  # noqa: ASYNC110 (clients count)
            await asyncio.sleep(0.02)
        over.set()
    assert is_ready(url)
