"""Keys over HTTP and gRPC, and quotas that two routers give together."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from redis.asyncio import Redis

from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from common.config import Settings
from common.errors import BatonError, ErrorKind
from router.app import serve
from router.tenancy import quota
from router.tenancy.quota import Quotas
from router.tenancy.store import RedisTenantStore
from router.tenancy.tenant import Tenant, key_digest
from tests.fakes.router_cluster import CLUSTER, MockCluster, mock_cluster
from tests.fakes.tiny_folder import make_tiny_folder

KEY = {"authorization": "Bearer bt-acme"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


async def put(cluster: MockCluster, *tenants: Tenant) -> None:
    for tenant in tenants:
        await RedisTenantStore(cluster.redis, CLUSTER).change(tenant.name, lambda _, tenant=tenant: tenant)


@asynccontextmanager
async def keyed_cluster(folder: Path, **tenant):
    """A cluster that knows one tenant, acme; its router has read it."""
    async with mock_cluster(folder, settings={"auth": "keys"}) as cluster:
        await put(
            cluster,
            Tenant("gone", key_digest("bt-gone"), revoked=True),
            Tenant("acme", key_digest("bt-acme"), **tenant),  # the last: who knows it knows both
        )
        async with asyncio.timeout(10):
            while (await cluster.http.get("/v1/models", headers=KEY)).status_code != 200:
                await cluster.router.fleet.wait_changed(0.05)
        yield cluster


def body(**fields):
    return {"prompt": "hello", "max_tokens": 2, **fields}


async def test_a_key_is_asked_for_on_every_route_of_the_api_and_on_no_other(folder):
    async with keyed_cluster(folder) as cluster:
        http = cluster.http
        for key, status, code in (("", 401, "unauthenticated"), ("Bearer nonsense", 401, "unauthenticated"),
                                  ("Bearer bt-gone", 403, "permission_denied")):  # fmt: skip
            response = await http.post("/v1/completions", json=body(), headers={"authorization": key} if key else {})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code)
            assert (await http.get("/v1/models", headers={"authorization": key} if key else {})).status_code == status
        assert (await http.post("/v1/completions", json=body(), headers=KEY)).status_code == 200
        assert [(await http.get(path)).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3


async def test_a_tenants_timeline_is_its_own(folder):
    async with keyed_cluster(folder) as cluster:
        await put(cluster, Tenant("other", key_digest("bt-other")))
        await cluster.http.post("/v1/completions", json=body(), headers={**KEY, "x-request-id": "mine"})
        assert (await cluster.http.get("/v1/requests/mine/timeline", headers=KEY)).status_code == 200
        other = {"authorization": "Bearer bt-other"}
        async with asyncio.timeout(10):
            while (await cluster.http.get("/v1/models", headers=other)).status_code != 200:
                await cluster.router.fleet.wait_changed(0.05)
        assert (await cluster.http.get("/v1/requests/mine/timeline", headers=other)).status_code == 404


async def test_grpc_wants_the_key_in_its_metadata(folder):
    async with keyed_cluster(folder) as cluster, grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer bt-acme"),)
        assert (await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)).models
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(metadata=(("authorization", "Bearer bt-gone"),)).read()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_over_quota_is_429_with_the_time_to_wait(folder):
    async with keyed_cluster(folder, requests_per_minute=2) as cluster:
        answers = [await cluster.http.post("/v1/completions", json=body(), headers=KEY) for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 429]
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        assert 20 <= int(answers[2].headers["retry-after"]) <= 30
        cluster.assert_nothing_left()


async def test_what_a_refused_list_of_prompts_was_granted_is_given_back_at_once(folder):
    """Whether the quota or a later prompt is why. Time stands still for the quotas: no lease runs out by itself."""
    async with keyed_cluster(folder, max_concurrent=3) as cluster:
        quotas = cluster.router.dispatcher._leases
        bad = await cluster.http.post("/v1/completions", json=body(prompt=[[1], [2], [1 << 30]]), headers=KEY)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt[2]")
        assert (quotas._granted, quotas._leases) == ({}, {})
        elsewhere = await quotas.acquire(Tenant("acme", "", max_concurrent=3), 1)
        full = await cluster.http.post("/v1/completions", json=body(prompt=["a", "b", "c"]), headers=KEY)
        assert full.status_code == 429
        assert (list(quotas._granted), quotas._leases) == ([elsewhere], {})
        quotas.release(elsewhere, 0)
        cluster.assert_nothing_left()


async def test_more_prompts_than_a_tenant_can_ever_have_at_once_are_the_requests_fault(folder):
    """Waiting does not help, so nobody is told to."""
    async with keyed_cluster(folder, max_concurrent=3) as cluster:
        answer = await cluster.http.post("/v1/completions", json=body(prompt=["a"] * 4), headers=KEY)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert "retry-after" not in answer.headers


async def test_two_routers_give_one_quota(folder):
    async with keyed_cluster(folder, requests_per_minute=6) as cluster:
        base = {"model": str(folder), "port": 0, "redis_url": cluster.redis_server.url, "cluster": CLUSTER}
        async with serve(Settings(**base, auth="keys")) as second:
            async with asyncio.timeout(10):
                while not second.fleet.ready:
                    await second.fleet.wait_changed(0.05)
            async with httpx.AsyncClient(timeout=30, headers=KEY) as http:
                urls = [cluster.router.http_url, second.http_url] * 5
                answers = await asyncio.gather(*(http.post(f"{url}/v1/completions", json=body()) for url in urls))
            # A slow machine may see one refilled; two quotas would let all ten through.
            assert 6 <= [a.status_code for a in answers].count(200) <= 7


async def test_a_dead_routers_places_come_back_and_a_live_ones_stay(folder, monkeypatch):
    monkeypatch.setattr(quota, "LEASE_S", 0.3)
    now = asyncio.get_running_loop().time
    async with mock_cluster(folder) as cluster, Redis.from_url(cluster.redis_server.url) as redis:
        tenant = Tenant("acme", max_concurrent=1)
        first, second = (Quotas(redis, CLUSTER, name, now) for name in ("r1", "r2"))
        lease = await first.acquire(tenant, 10)
        first.hold(lease)
        for _ in range(3):  # renewed
            await cluster.router.fleet.wait_changed(0.2)
            await first._sync()
            with pytest.raises(BatonError) as caught:
                await second.acquire(tenant, 10)
            assert caught.value.kind is ErrorKind.OVER_QUOTA
        async with asyncio.timeout(5):  # first is dead: nobody renews
            while True:
                try:
                    lease = await second.acquire(tenant, 10)
                    break
                except BatonError:
                    await cluster.router.fleet.wait_changed(0.05)
        second.hold(lease)
        second.release(lease, 5)
        await second._sync()
        assert await redis.zcard(second._lease_key("acme")) == 0


async def test_without_redis_each_router_gives_its_share():
    down = Redis.from_url("redis://127.0.0.1:1")
    quotas = Quotas(down, CLUSTER, "r", asyncio.get_running_loop().time)
    quotas.num_routers = 2
    tenant = Tenant("acme", requests_per_minute=10)
    answers = await asyncio.gather(*(quotas.acquire(tenant, 1) for _ in range(20)), return_exceptions=True)
    granted = sum(isinstance(answer, str) for answer in answers)
    assert {answer.kind for answer in answers if isinstance(answer, BatonError)} == {ErrorKind.OVER_QUOTA}
    assert granted == 5
    await down.aclose()


async def test_several_routers_share_one_port(folder):
    async with mock_cluster(folder, settings={"reuse_port": True}) as cluster:
        port = int(cluster.router.http_url.rsplit(":", 1)[1])
        base = {"model": str(folder), "redis_url": cluster.redis_server.url, "cluster": CLUSTER, "auth": "anonymous"}
        async with serve(Settings(**base, port=port, reuse_port=True)) as second:
            async with asyncio.timeout(10):
                while not second.fleet.ready:
                    await second.fleet.wait_changed(0.05)
            async with asyncio.timeout(20):  # the kernel spreads connections
                while len({spec.transfer_id.split("-")[0] for spec in cluster.decodes[0].seen}) < 2:
                    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=30) as http:
                        assert (await http.post("/v1/completions", json=body())).status_code == 200
