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
from common.registry import (
    blocks_key,
    decode_record,
    host_blocks_key,
    reread_key,
    sequence_key,
    worker_key,
    workers_key,
)
from common.worker.index_writer import CHUNK
from common.worker.info import WorkerInfo
from common.worker.registry_publisher import RegistryPublisher, SnapshotReason, connect

BOUND_S = 20.0
CLUSTER = "test"
MAX_BLOCKS = 1 << 20


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


Hashes = range | tuple[int, ...]


def changes(
    stored: Hashes = (), evicted: Hashes = (), host_stored: Hashes = (), host_evicted: Hashes = ()
) -> CacheChanges:
    return CacheChanges(*([h(i) for i in hashes] for hashes in (stored, evicted, host_stored, host_evicted)))


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
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
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
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
    await publisher.start()
    publisher.on_changes(changes(stored=range(5)))
    publisher.on_changes(changes(stored=(7,), evicted=(0, 1)))
    publisher.on_changes(changes(stored=(0,)))
    expected = {h(i) for i in (0, 2, 3, 4, 7)}
    await eventually(lambda: _equals(blocks(redis, info), expected))
    assert await redis.pttl(blocks_key(CLUSTER, "p0", info.epoch)) > 0
    await publisher.close()


async def test_draining_is_told_at_once(redis):
    publisher = RegistryPublisher(redis, CLUSTER, make_info(), MAX_BLOCKS)
    await publisher.start()
    publisher.drain()

    async def is_draining() -> bool:
        return decode_record(await redis.get(worker_key(CLUSTER, "p0"))).draining

    await eventually(is_draining)
    await publisher.close()


async def test_a_snapshot_larger_than_a_chunk_is_whole(redis):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
    publisher.on_changes(changes(stored=range(2 * CHUNK + 1)))
    await publisher.start()
    assert len(await blocks(redis, info)) == 2 * CHUNK + 1
    await publisher.close()


async def test_the_host_tier_is_a_set_of_its_own(redis):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
    publisher.on_changes(changes(stored=range(6), host_stored=(4, 5)))
    await publisher.start()
    key = host_blocks_key(CLUSTER, info.worker_id, info.epoch)
    assert await redis.smembers(key) == {h(4), h(5)}
    publisher.on_changes(changes(evicted=(5,), host_stored=(3,), host_evicted=(5,)))
    await eventually(lambda: _equals(redis.smembers(key), {h(3), h(4)}))
    assert await blocks(redis, info) == {h(i) for i in range(5)}
    await publisher.close()
    assert await redis.keys("*") == []


async def test_a_batch_that_redis_missed_leads_to_one_snapshot_though_the_sizes_are_equal(redis):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
    publisher.on_changes(changes(stored=range(4)))
    await publisher.start()
    # As after a failover to a replica that had not heard of the last batch.
    await redis.decr(sequence_key(CLUSTER, info.worker_id, info.epoch))
    await redis.srem(blocks_key(CLUSTER, info.worker_id, info.epoch), h(3))
    await redis.sadd(blocks_key(CLUSTER, info.worker_id, info.epoch), h(77))
    publisher.on_changes(changes(stored=(4,)))
    await eventually(lambda: _equals(blocks(redis, info), {h(i) for i in range(5)}))
    assert publisher.num_snapshots == {SnapshotReason.START: 1, SnapshotReason.GAP: 1}
    publisher.on_changes(changes(stored=(5,)))
    await eventually(lambda: _equals(blocks(redis, info), {h(i) for i in range(6)}))
    assert publisher.num_snapshots[SnapshotReason.GAP] == 1
    await publisher.close()


async def test_a_router_that_finds_the_index_wrong_has_it_written_anew(redis, monkeypatch):
    monkeypatch.setattr("common.worker.registry_publisher.MIN_REREAD_INTERVAL_S", 0.0)
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
    publisher.on_changes(changes(stored=range(4)))
    await publisher.start()
    key = blocks_key(CLUSTER, info.worker_id, info.epoch)
    await redis.srem(key, h(3))
    await redis.sadd(key, h(99))  # as many as before, so that no count gives it away
    await redis.set(reread_key(CLUSTER, info.worker_id, info.epoch), 1)
    await eventually(lambda: _equals(blocks(redis, info), {h(i) for i in range(4)}))
    assert not await redis.exists(reread_key(CLUSTER, info.worker_id, info.epoch)), "asked once, done once"
    await publisher.close()
    assert publisher.num_snapshots[SnapshotReason.ASKED] == 1


async def test_a_worker_enters_no_more_blocks_than_its_cap_and_stays_in_step(redis):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info, 10)
    publisher.on_changes(changes(stored=range(15)))
    await publisher.start()
    assert await blocks(redis, info) == {h(i) for i in range(10)}
    assert (publisher.num_indexed_blocks, publisher.num_left_out) == (10, 5)
    publisher.on_changes(changes(evicted=(0, 1, 12), stored=(20,)))
    await eventually(lambda: _equals(blocks(redis, info), {h(i) for i in (*range(2, 10), 20)}))
    await publisher._round(renew=True)
    assert publisher.num_snapshots == {SnapshotReason.START: 1}, "what was left out is no difference"
    await publisher.close()


@pytest.mark.parametrize("damage", ["lost", "extra", "gone"])
async def test_a_set_that_differs_from_the_cache_is_found_and_written_anew(redis, damage):
    info = make_info()
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
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
    publisher = RegistryPublisher(redis, CLUSTER, info, MAX_BLOCKS)
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
    publisher = RegistryPublisher(redis, CLUSTER, make_info(), MAX_BLOCKS)
    await publisher.start()
    publisher.on_changes(changes(stored=(1,)))
    await publisher.close()
    await redis.aclose()


async def test_an_old_incarnation_does_not_take_its_successors_record_away(redis):
    old = RegistryPublisher(redis, CLUSTER, make_info("0" * 16), MAX_BLOCKS)
    await old.start()
    new = RegistryPublisher(redis, CLUSTER, make_info("1" * 16), MAX_BLOCKS)
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
