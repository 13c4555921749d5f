"""The registry tells the truth about a worker: its record, its lease, and exactly the blocks that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.embedded_redis import EmbeddedRedis
from common.kvcache.prefix_cache import CacheChanges
from common.registry import blocks_key, decode_record, worker_key, workers_key
from common.worker.info import WorkerInfo
from common.worker.registry_publisher import SNAPSHOT_CHUNK, RegistryPublisher, connect

BOUND_S = 20.0
CLUSTER = "test"


def make_info(epoch: str = "e" * 16, worker_id: str = "p0") -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        epoch=epoch,
        role="prefill",
        grpc_address="127.0.0.1:1",
        metrics_url="",
        model_name="m",
        model_fingerprint="f",
        dtype="float32",
        block_size=16,
        num_blocks=8,
        max_model_len=128,
    )


def h(i: int) -> bytes:
    return i.to_bytes(16, "big")


def changes(stored: range | tuple[int, ...] = (), evicted: range | tuple[int, ...] = ()) -> CacheChanges:
    return CacheChanges([h(i) for i in stored], [h(i) for i in evicted])


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    with EmbeddedRedis(tmp_path) as server:
        client = connect(server.url)
        yield client
        await client.aclose()


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Polls Redis, which can't call back. Raises TimeoutError."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                if await condition():
                    return
            except (RedisError, OSError):
                pass
            await asyncio.sleep(0.01)


async def blocks(redis: Redis, info: WorkerInfo) -> set[bytes]:
    return await redis.smembers(blocks_key(CLUSTER, info.worker_id, info.epoch))


async def test_a_worker_announces_itself_with_a_lease_and_leaves_without_a_trace(redis):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info)
    publisher.on_changes(changes(stored=(1, 2)))
    await publisher.start()
    key = worker_key(CLUSTER, "p0")
    assert decode_record(await redis.get(key)) == info.record(draining=False)
    assert await redis.smembers(workers_key(CLUSTER)) == {b"p0"}
    assert await blocks(redis, info) == {h(1), h(2)}
    assert 0 < await redis.pttl(key) <= 3000
    assert 0 < await redis.pttl(blocks_key(CLUSTER, "p0", info.epoch)) <= 3000
    await publisher.close()
    assert await redis.keys("*") == []


async def test_the_block_set_follows_the_cache(redis):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info)
    await publisher.start()
    publisher.on_changes(changes(stored=range(5)))
    publisher.on_changes(changes(stored=(7,), evicted=(0, 1)))
    publisher.on_changes(changes(stored=(0,)))
    expected = {h(i) for i in (0, 2, 3, 4, 7)}
    await eventually(lambda: _equals(blocks(redis, info), expected))
    assert await redis.pttl(blocks_key(CLUSTER, "p0", info.epoch)) > 0
    await publisher.close()


async def test_draining_is_told_at_once(redis):
    publisher = RegistryPublisher(redis, CLUSTER, make_info())
    await publisher.start()
    publisher.drain()

    async def is_draining() -> bool:
        return decode_record(await redis.get(worker_key(CLUSTER, "p0"))).draining

    await eventually(is_draining)
    await publisher.close()


async def test_a_snapshot_larger_than_a_chunk_is_whole(redis):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info)
    publisher.on_changes(changes(stored=range(2 * SNAPSHOT_CHUNK + 1)))
    await publisher.start()
    assert len(await blocks(redis, info)) == 2 * SNAPSHOT_CHUNK + 1
    await publisher.close()


@pytest.mark.parametrize("damage", ["lost", "extra", "gone"])
async def test_a_set_that_differs_from_the_cache_is_found_and_written_anew(redis, damage):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info)
    publisher.on_changes(changes(stored=range(4)))
    await publisher.start()
    key = blocks_key(CLUSTER, "p0", info.epoch)
    if damage == "lost":
        await redis.srem(key, h(1))
    elif damage == "extra":
        await redis.sadd(key, h(99))
    else:
        await redis.delete(key)
    await eventually(lambda: _equals(blocks(redis, info), {h(i) for i in range(4)}))
    await publisher.close()


async def test_redis_may_go_and_come_back_empty(tmp_path):
    info = make_info()
    server = EmbeddedRedis(tmp_path)
    server.start()
    redis = connect(server.url)
    publisher = RegistryPublisher(redis, CLUSTER, info)
    publisher.on_changes(changes(stored=range(4)))
    await publisher.start()
    server.stop()
    publisher.on_changes(changes(stored=(10,), evicted=(0,)))
    await eventually(lambda: _is(lambda: not publisher._reachable))
    publisher.on_changes(changes(stored=(11,), evicted=(1,)))
    server = EmbeddedRedis(tmp_path)
    server.start()
    expected = {h(i) for i in (2, 3, 10, 11)}
    await eventually(lambda: _equals(blocks(redis, info), expected))
    assert await redis.exists(worker_key(CLUSTER, "p0"))
    publisher.on_changes(changes(stored=(12,)))
    await eventually(lambda: _equals(blocks(redis, info), expected | {h(12)}))
    await publisher.close()
    await redis.aclose()
    server.stop()


async def test_a_worker_starts_and_stops_without_redis(tmp_path):
    redis = connect(f"unix://{tmp_path}/nobody.sock")
    publisher = RegistryPublisher(redis, CLUSTER, make_info())
    await publisher.start()
    publisher.on_changes(changes(stored=(1,)))
    await publisher.close()
    await redis.aclose()


async def test_an_old_incarnation_does_not_take_its_successors_record_away(redis):
    old = RegistryPublisher(redis, CLUSTER, make_info("0" * 16))
    await old.start()
    new = RegistryPublisher(redis, CLUSTER, make_info("1" * 16))
    new.on_changes(changes(stored=(1,)))
    await new.start()
    await old.close()
    assert decode_record(await redis.get(worker_key(CLUSTER, "p0"))).epoch == "1" * 16
    assert await blocks(redis, make_info("1" * 16)) == {h(1)}
    assert await redis.smembers(workers_key(CLUSTER)) == {b"p0"}
    await new.close()
    assert await redis.keys("*") == []


async def _equals(value: Awaitable[object], expected: object) -> bool:
    return await value == expected


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()
