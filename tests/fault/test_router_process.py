"""The router as a process of its own, on uvloop as `baton router` runs it; and a worker's process that stops moving."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from common.model.fingerprint import model_fingerprint
from tests.fakes.mock_worker import scripted_token
from tests.fakes.router_cluster import CLUSTER, Events, MockCluster, mock_cluster
from tests.fakes.tiny_folder import make_tiny_folder

ROOT = Path(__file__).resolve().parents[2]
ROUTER = """
import json, sys, uvloop
from common.config import Settings
from common.telemetry import configure_logging
from router.app import run
configure_logging("info", "json", "router")
uvloop.run(run(Settings(**json.loads(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


@asynccontextmanager
async def process(*arguments: str):
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def logged(child, event: str) -> dict:
    """The first log line with this event."""
    async with asyncio.timeout(20):
        async for line in child.stderr:
            entry = json.loads(line)
            if entry["event"] == event:
                return entry
    raise AssertionError(f"{event!r} was never logged")


@asynccontextmanager
async def router_process(cluster: MockCluster, **settings):
    values = {"model": str(cluster.folder), "port": 0, "redis_url": cluster.redis_server.url, "cluster": CLUSTER}
    values["auth"] = "anonymous"
    values["local_prefill_max_tokens"] = 0
    async with process("-c", ROUTER, json.dumps({**values, **settings})) as child:
        url = (await logged(child, "router is listening"))["http"]
        await logged(child, "router is ready")
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield child, http


async def test_sigterm_lets_a_stream_finish_and_the_process_exit_with_zero(folder):
    async with mock_cluster(folder) as cluster, router_process(cluster, shutdown_grace_s=20.0) as (child, http):
        decode = cluster.decodes[0]
        decode.steps.close()
        body = {"prompt": [5, 6, 7], "max_tokens": 6, "stream": True, "return_token_ids": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            events = Events(response)
            await events.next()
            child.send_signal(signal.SIGTERM)
            await logged(child, "router is stopping")
            decode.steps.open()
            await events.rest()
        assert events.token_ids == [scripted_token([5, 6, 7], i) for i in range(6)]
        assert events.done
        assert await asyncio.wait_for(child.wait(), 10) == 0
        rest = [json.loads(line) for line in (await child.stderr.read()).splitlines()]
        assert not [entry for entry in rest if entry["level"] in ("error", "critical")], rest


async def test_a_killed_router_costs_its_workers_nothing(folder):
    async with mock_cluster(folder) as cluster, router_process(cluster) as (child, http):
        cluster.decodes[0].steps.close()
        body = {"prompt": [5, 6, 7], "max_tokens": 6, "stream": True, "return_token_ids": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            await Events(response).next()
            child.kill()
            await cluster.decodes[0].until(lambda: not cluster.decodes[0].live)
            await cluster.prefills[0].until(lambda: not cluster.prefills[0].live)
        assert cluster.router.fleet.ready, "and the other router's sessions stand"


async def test_a_worker_that_stops_moving_is_noticed_and_its_request_goes_elsewhere(folder):
    async with mock_cluster(folder, prefill=0) as cluster:
        arguments = (cluster.redis_server.url, CLUSTER, model_fingerprint(folder), "stuck")
        async with process("-m", "tests.fakes.mock_prefill_process", *arguments) as stuck:
            assert await asyncio.wait_for(stuck.stdout.readline(), 20) == b"up\n"
            await cluster.until(lambda: cluster.router.fleet.usable("prefill"), "its session")
            task = asyncio.create_task(cluster.complete(prompt=[5, 6, 7], max_tokens=4, return_token_ids=True))
            assert await asyncio.wait_for(stuck.stdout.readline(), 20) == b"busy\n"
            healthy = await cluster.add_worker("prefill")
            await cluster.connected(healthy)
            stuck.send_signal(signal.SIGSTOP)
            answer = await asyncio.wait_for(task, 20)
            assert answer["choices"][0]["token_ids"] == [scripted_token([5, 6, 7], i) for i in range(4)]
            await healthy.kill()
