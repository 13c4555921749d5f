"""A whole router, as the process runs it, before mock workers: real HTTP, gRPC and Redis on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.model.fingerprint import model_fingerprint
from router.app import RunningRouter, serve
from tests.fakes.mock_worker import MockWire, MockWorker

CLUSTER = "test"


@dataclass
class MockCluster:
    """prefills and decodes: the workers that were started, dead ones included."""

    folder: Path
    redis_server: EmbeddedRedis
    redis: Redis
    fingerprint: str
    wire: MockWire = field(default_factory=MockWire)
    prefills: list[MockWorker] = field(default_factory=list)
    decodes: list[MockWorker] = field(default_factory=list)
    router: RunningRouter = None  # type: ignore[assignment]
    router_stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    http: httpx.AsyncClient = None  # type: ignore[assignment]

    @property
    def workers(self) -> list[MockWorker]:
        return [*self.prefills, *self.decodes]

    async def add_worker(self, role: str, *, register: bool = True, **options: Any) -> MockWorker:
        worker = MockWorker(role, self.wire, self.fingerprint, **options)
        await worker.start()
        (self.prefills if role == "prefill" else self.decodes).append(worker)
        if register:
            await worker.register(self.redis, CLUSTER)
        return worker

    async def connected(self, *workers: MockWorker) -> None:
        """Until the router has a session with each of them."""
        fleet = self.router.fleet
        await self.until(
            lambda: all((s := fleet.session(w.worker_id)) is not None and s.ready for w in workers), "every session"
        )

    async def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
        """Polls what belongs to the router; workers have their own `until`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"waited {timeout_s:g} s for {what}")
            await self.router.fleet.wait_changed(0.005)

    async def ready_status(self, wanted: int) -> None:
        """Until /ready answers `wanted`."""
        async with asyncio.timeout(15):
            while (await self.http.get("/ready")).status_code != wanted:
                await self.router.fleet.wait_changed(0.02)

    async def stop_router(self) -> None:
        """What SIGTERM does; returns when the router has stopped."""
        await self.router_stack.aclose()

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post("/v1/completions", json={"prompt": "hello", **body})
        assert response.status_code == 200, response.text
        return response.json()

    def assert_nothing_left(self) -> None:
        """No request, subscription or predicted load in the router; no sequence in a live worker."""
        assert self.router.dispatcher.num_in_flight == 0
        for session in self.router.fleet.sessions():
            table = session._subscriptions
            assert (len(table), table.unanswered_prefill_tokens, table.unconfirmed_blocks) == (0, 0, 0)
        assert {transfer_id for worker in self.workers for transfer_id in worker.live} == set()


@asynccontextmanager
async def mock_cluster(
    folder: Path, *, prefill: int = 1, decode: int = 1, settings: dict[str, Any] | None = None, **worker_options: Any
) -> AsyncIterator[MockCluster]:
    """Leaving it checks that no task of the router is left over."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        server = EmbeddedRedis()
        await asyncio.to_thread(server.start)
        stack.callback(server.stop)
        redis = Redis.from_url(server.url)
        stack.push_async_callback(redis.aclose)
        cluster = MockCluster(folder, server, redis, model_fingerprint(folder))
        for role, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                worker = await cluster.add_worker(role, worker_id=f"{role}-{index}", **worker_options)
                stack.push_async_callback(worker.kill)
        base = {"model": str(folder), "port": 0, "redis_url": server.url, "cluster": CLUSTER, "shutdown_grace_s": 0.0}
        base["auth"] = "anonymous"
        base["local_prefill_max_tokens"] = 0  # prompts of tests are short: they would all stay with decode
        running = serve(Settings(**{**base, **(settings or {})}))
        stack.push_async_callback(cluster.router_stack.aclose)
        cluster.router = await cluster.router_stack.enter_async_context(running)
        client = httpx.AsyncClient(base_url=cluster.router.http_url, timeout=30)
        cluster.http = await stack.enter_async_context(client)
        await cluster.connected(*cluster.workers)
        yield cluster
    left = {t for t in asyncio.all_tasks() - before if not t.done()}
    assert not left, left


class Events:
    """One streamed answer, read event by event. `events` holds those read so far, decoded; DONE ends them."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.events: list[dict[str, Any]] = []
        self.done = False
        self._lines = response.aiter_lines()

    async def next(self) -> dict[str, Any] | None:
        """The next event, or None at the end of the stream."""
        async for line in self._lines:
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                self.events.append(json.loads(line[6:]))
                return self.events[-1]
        return None

    async def rest(self) -> list[dict[str, Any]]:
        while await self.next() is not None:
            pass
        return self.events

    @property
    def text(self) -> str:
        return "".join(self._piece(choice) for event in self.events for choice in event.get("choices", ()))

    @property
    def token_ids(self) -> list[int]:
        return [t for event in self.events for choice in event.get("choices", ()) for t in choice.get("token_ids", ())]

    @property
    def finish_reasons(self) -> list[str]:
        reasons = (c["finish_reason"] for event in self.events for c in event.get("choices", ()))
        return [reason for reason in reasons if reason is not None]

    @staticmethod
    def _piece(choice: dict[str, Any]) -> str:
        return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@asynccontextmanager
async def streamed(cluster: MockCluster, path: str = "/v1/completions", **body: Any) -> AsyncIterator[Events]:
    """A streamed answer; leaving early disconnects."""
    async with cluster.http.stream("POST", path, json={"prompt": "hello", "stream": True, **body}) as response:
        if response.status_code != 200:
            await response.aread()
        yield Events(response)
