"""The router against real Redis and real worker sessions: who is used, and what happens when parts come and go."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.errors import StartupError
from common.kvcache.block_hash import chain_hashes
from common.registry import blocks_key, host_blocks_key
from router.app import serve
from router.cluster.prefix_index import CachedPrefix, PrefixIndex
from tests.fakes.mock_worker import scripted_token
from tests.fakes.router_cluster import CLUSTER, mock_cluster, streamed
from tests.fakes.router_parts import make_record
from tests.fakes.tiny_folder import make_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


async def test_ready_follows_the_workers(folder):
    async with mock_cluster(folder, prefill=0, decode=0) as cluster:
        assert (await cluster.http.get("/ready")).status_code == 503
        assert (await cluster.http.get("/health")).status_code == 200
        decode = await cluster.add_worker("decode")
        await cluster.ready_status(200)
        assert (await cluster.complete(max_tokens=3))["usage"]["completion_tokens"] == 3
        prefill = await cluster.add_worker("prefill")
        await cluster.connected(prefill)
        await cluster.ready_status(200)
        await decode.kill()
        await cluster.ready_status(503)
        await prefill.kill()


async def test_redis_may_go_and_come_back_empty_while_requests_are_served(folder):
    async with mock_cluster(folder, prefill=2, decode=2) as cluster:
        undisturbed = await cluster.complete(max_tokens=5)
        for worker in cluster.decodes:
            worker.steps.close()
        async with streamed(cluster, max_tokens=5) as events:
            await events.next()
            cluster.redis_server.stop()
            for worker in cluster.decodes:
                worker.steps.open()
            await events.rest()
        assert events.done
        assert (await cluster.complete(max_tokens=5))["choices"] == undisturbed["choices"]
        assert (await cluster.http.get("/ready")).status_code == 200


async def test_a_registry_that_was_emptied_empties_no_fleet(folder):
    async with mock_cluster(folder) as cluster:
        await cluster.redis.flushall()
        late = await cluster.add_worker("decode")
        await cluster.connected(late)
        assert len(cluster.router.fleet.sessions()) == 3, "those that are connected stay"
        await cluster.complete(max_tokens=3)
        await late.kill()


async def test_a_dead_worker_whose_record_is_gone_is_forgotten_and_no_other(folder):
    async with mock_cluster(folder, decode=2) as cluster:
        victim = cluster.decodes[0]
        await victim.kill()
        await victim.unregister(cluster.redis, CLUSTER)
        await cluster.until(lambda: cluster.router.fleet.session(victim.worker_id) is None, "the dead to be forgotten")
        await cluster.complete(max_tokens=3)


async def test_draining_workers_get_nothing_new_and_finish_what_they_have(folder):
    async with mock_cluster(folder, decode=2) as cluster:
        for worker in cluster.decodes:
            worker.steps.close()
        async with streamed(cluster, max_tokens=5) as events:
            await events.next()
            draining = next(worker for worker in cluster.decodes if worker.live)
            other = next(worker for worker in cluster.decodes if worker is not draining)
            await draining.register(cluster.redis, CLUSTER, draining=True)
            await cluster.until(lambda: len(cluster.router.fleet.usable("decode")) == 1, "the mark to be seen")
            for worker in cluster.decodes:
                worker.steps.open()
            await asyncio.gather(*(cluster.complete(max_tokens=2) for _ in range(6)))
            await events.rest()
        assert events.finish_reasons == ["length"]
        assert (len(draining.seen), len(other.seen)) == (1, 6)


async def test_workers_of_another_model_are_left_alone(folder):
    async with mock_cluster(folder, decode=0) as cluster:
        cluster.fingerprint = "another"
        foreign = await cluster.add_worker("decode")
        wide = await cluster.add_worker("decode", block_size=32)
        cluster.fingerprint = cluster.router.model.fingerprint
        good = await cluster.add_worker("decode")
        await cluster.connected(good)
        assert {s.record.worker_id for s in cluster.router.fleet.sessions("decode")} == {good.worker_id}
        for worker in (foreign, wide, good):
            await worker.kill()


async def test_a_prefill_worker_with_blocks_of_another_size_serves(folder):
    async with mock_cluster(folder, prefill=0) as cluster:
        wide = await cluster.add_worker("prefill", block_size=32)
        await cluster.connected(wide)
        answer = await cluster.complete(prompt=[5, 6, 7], max_tokens=4, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == [scripted_token([5, 6, 7], i) for i in range(4)]
        assert len(wide.seen) == 1
        await wide.kill()


async def test_the_longest_cached_prefix_draws_the_request_unless_its_worker_is_busier(folder):
    async with mock_cluster(folder, prefill=3, decode=1) as cluster:
        prompt = [5 + i % 200 for i in range(160)]
        # Another prompt: what this router sent somewhere itself counts as cached there, too.
        whole = await cluster.complete(prompt=prompt[::-1], max_tokens=1)
        assert whole["usage"]["prompt_tokens"] == 160
        # The mock workers publish no blocks: the test does it for them, as hashes of the same seed.
        first = next(worker for worker in cluster.prefills if worker.seen)
        hashes = chain_hashes(first.seen[0].hash_seed, prompt, 16)
        for index, count in ((1, 4), (2, 8)):
            worker = cluster.prefills[index]
            await cluster.redis.sadd(blocks_key(CLUSTER, worker.worker_id, worker.epoch), *hashes[:count])
        for worker in cluster.prefills:
            worker.seen.clear()
        for _ in range(3):
            await cluster.complete(prompt=prompt, max_tokens=1)
        assert [len(worker.seen) for worker in cluster.prefills] == [0, 0, 3]
        # 32 tokens a request wait there then, until that is longer than 64 more elsewhere, and their price.
        cluster.prefills[2].first_tokens.close()
        tasks = [asyncio.create_task(cluster.complete(prompt=prompt, max_tokens=1)) for _ in range(16)]
        await cluster.until(lambda: sum(len(w.seen) for w in cluster.prefills) == 19, "all to be placed")
        assert len(cluster.prefills[1].seen) >= 1
        assert 6 < len(cluster.prefills[2].seen) < 19
        cluster.prefills[2].first_tokens.open()
        await asyncio.gather(*tasks)


async def test_one_round_trip_finds_every_workers_prefix_and_its_tier():
    with EmbeddedRedis() as server:
        redis = Redis.from_url(server.url)
        index = PrefixIndex(redis, CLUSTER, time.monotonic)
        hashes = chain_hashes(b"s" * 16, list(range(16 * 200)), 16)
        lengths = [0, 1, 2, 3, 63, 64, 65, 127, 199, 200]
        workers = [msgspec.structs.replace(make_record(f"w{n}", "prefill"), has_host_tier=n % 2 == 1) for n in lengths]
        on_device = {n: n // 3 if n % 2 else n for n in lengths}
        for worker, length in zip(workers, lengths, strict=True):
            await redis.sadd(blocks_key(CLUSTER, worker.worker_id, worker.epoch), b"x" * 16, *hashes[:length])
            host = hashes[on_device[length] : length] or [b"y" * 16]
            await redis.sadd(host_blocks_key(CLUSTER, worker.worker_id, worker.epoch), *host)
        for known in (200, 1, 2, 3, 64, 100):
            found = await index.lookup(workers, b"".join(hashes[:known]))
            assert found == [CachedPrefix(min(n, known), min(on_device[n], known)) for n in lengths], known
        before = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
        await index.lookup(workers, b"".join(hashes))
        assert (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1
        await redis.script_flush()
        found = await index.lookup(workers, b"".join(hashes))
        assert [prefix.blocks for prefix in found] == lengths, "a restarted Redis knows no script"
        restarted = [msgspec.structs.replace(worker, epoch="e2") for worker in workers]
        found = await index.lookup(restarted, b"".join(hashes))
        assert {prefix.blocks for prefix in found} == {0}, "what an earlier incarnation held is dead at once"
        await redis.aclose()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"redis_url": ""}, "--redis-url"),
        ({"redis_url": "nonsense"}, "redis_url is not understood"),
        ({"model": ""}, "--model"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"host": "203.0.113.1"}, "--host"),
    ],
)
async def test_what_makes_a_start_impossible_is_one_line(folder, changes, words):
    base = {"model": str(folder), "port": 0, "redis_url": "redis://127.0.0.1:1"}
    with pytest.raises(StartupError, match=words) as caught:
        async with serve(Settings(**{**base, **changes})):
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("setting", "option"), [("port", "--port"), ("grpc_port", "--grpc-port")])
async def test_a_port_in_use_says_what_to_do(folder, setting, option):
    base = {"model": str(folder), "port": 0, "redis_url": "redis://127.0.0.1:1"}
    async with serve(Settings(**base)) as first:
        address = first.http_url if setting == "port" else first.grpc_address
        port = int(address.rsplit(":", 1)[1])
        words = f"port {port} on 127.0.0.1 is in use: stop the other server or pass {option}"
        with pytest.raises(StartupError, match=words):
            async with serve(Settings(**{**base, setting: port})):
                pass
