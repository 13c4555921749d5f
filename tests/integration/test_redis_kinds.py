"""Registry and index on every kind of Redis that a url can name: one server, a real 3-node cluster, a real Sentinel."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common import die_with_parent
from common.embedded_redis import find_redis_server
from common.errors import StartupError
from common.kvcache.prefix_cache import CacheChanges
from common.redis_client import RedisTimeouts, connect, place_of
from common.worker.registry_publisher import RegistryPublisher
from common.worker.registry_publisher import connect as connect_worker
from router.cluster.prefix_index import CachedPrefix, PrefixIndex
from router.cluster.registry import ModelIdentity, RegistryWatcher
from tests.integration.test_worker_registry import CLUSTER, eventually, h, make_info

SLOTS = 16384
NODES = 3
CHAIN = b"".join(h(i) for i in range(20))


def free_ports(count: int) -> list[int]:
    """Below 55,536, so that a cluster node's bus port exists; all different."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            if (port := probe.getsockname()[1]) < 55_000:
                ports.append(port)
        return ports


@contextlib.contextmanager
def server(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    command = [find_redis_server(), *arguments, "--dir", str(folder), "--daemonize", "no"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(die_with_parent.command(command), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def node(folder: Path, port: int, *more: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    options = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no")
    return server(folder, *options, *more)


async def answers(port: int) -> bool:
    async with Redis(port=port) as client:
        return bool(await client.ping())


async def form_cluster(ports: list[int]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Redis(port=port)) for port in ports]
        for index, client in enumerate(clients):
            await eventually(lambda port=ports[index]: answers(port))
            first, last = index * SLOTS // NODES, (index + 1) * SLOTS // NODES
            await client.execute_command("CLUSTER", "ADDSLOTS", *range(first, last))
            await client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            await client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0])

        async def formed() -> bool:
            told = [(await client.execute_command("CLUSTER", "INFO")).decode() for client in clients]
            return all("cluster_state:ok" in t and f"cluster_known_nodes:{NODES}" in t for t in told)

        await eventually(formed)


@pytest.fixture
async def cluster_url(tmp_path) -> AsyncIterator[str]:
    ports = free_ports(NODES)
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(node(tmp_path / str(port), port, "--cluster-enabled", "yes"))
        await form_cluster(ports)
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def holds(index: PrefixIndex, record, blocks: int) -> bool:
    return await index.lookup([record], CHAIN) == [CachedPrefix(blocks, blocks)]


async def check_registry_and_index(url: str) -> None:
    """A worker publishes, a router reads; nothing is left behind."""
    writing, reading = connect_worker(url), connect(url, RedisTimeouts())
    info = make_info()
    publisher = RegistryPublisher(writing, CLUSTER, info, 1000)
    publisher.on_changes(CacheChanges([h(i) for i in range(10)], []))
    await publisher.start()
    seen: list[dict] = []
    watcher = RegistryWatcher(reading, CLUSTER, ModelIdentity("f", 16), lambda records: seen.append(dict(records)))
    await watcher.poll()
    assert [list(records) for records in seen] == [["p0"]]
    index, record = PrefixIndex(reading, CLUSTER, time.monotonic), info.record(draining=False)
    await eventually(lambda: holds(index, record, 10))
    publisher.on_changes(CacheChanges([h(i) for i in range(10, 15)], []))
    await eventually(lambda: holds(index, record, 15))
    await publisher._round(renew=True)
    assert sum(publisher.num_snapshots.values()) == 1, "the audit reads what was written"
    await publisher.close()
    await watcher.poll()
    assert seen[-1] == {}
    await writing.aclose()
    await reading.aclose()


async def test_a_redis_cluster_of_three_nodes(cluster_url):
    await check_registry_and_index(cluster_url)


@pytest.fixture
async def sentinel(tmp_path) -> AsyncIterator[tuple[str, subprocess.Popen[bytes], int]]:
    """A master, its replica, and a Sentinel that needs half a second of silence to promote the replica."""
    master, replica, port = free_ports(3)
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor baton 127.0.0.1 {master} 1\n"
        "sentinel down-after-milliseconds baton 500\nsentinel failover-timeout baton 2000\n"
    )
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(node(tmp_path / "master", master, "--repl-diskless-sync-delay", "0"))
        await eventually(lambda: answers(master))
        stack.enter_context(node(tmp_path / "replica", replica, "--replicaof", "127.0.0.1", str(master)))
        async with Redis(port=replica) as client:
            await eventually(lambda: _is_replicating(client))
        stack.enter_context(server(tmp_path / "sentinel", str(config), "--sentinel"))
        async with Redis(port=port) as client:
            await eventually(lambda: client.execute_command("SENTINEL", "REPLICAS", "baton"))
        yield f"redis+sentinel://127.0.0.1:{port}/baton", process, replica


async def _is_replicating(client: Redis) -> bool:
    return (await client.info("replication"))["master_link_status"] == "up"


async def test_the_master_that_a_sentinel_names_and_after_its_death_the_next(sentinel):
    url, master, replica = sentinel
    await check_registry_and_index(url)
    writing, reading = connect_worker(url), connect(url, RedisTimeouts(answer_s=1.0))
    info = make_info()
    publisher = RegistryPublisher(writing, CLUSTER, info, 1000)
    publisher.on_changes(CacheChanges([h(i) for i in range(10)], []))
    await publisher.start()
    master.kill()
    publisher.on_changes(CacheChanges([h(10)], []))
    index = PrefixIndex(reading, CLUSTER, time.monotonic)
    await eventually(lambda: holds(index, info.record(draining=False), 11))
    async with Redis(port=replica) as client:
        assert (await client.info("replication"))["role"] == "master"
    await publisher.close()
    await writing.aclose()
    await reading.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "http://host:1",
        "redis+cluster://host:port",
        "redis+cluster://host:1/3",
        "redis+sentinel://host:1",
        "redis+sentinel://host:1/name/x",
        "redis+sentinel://,/name",
        "",
    ],
)
def test_a_url_that_names_no_redis_is_refused_in_one_line(url):
    with pytest.raises(StartupError, match="redis_url is not understood") as error:
        connect(url, RedisTimeouts())
    assert "\n" not in str(error.value)


def test_what_is_told_of_a_url_holds_no_password():
    assert place_of("redis+cluster://user:p%40ss@[::1]:7000,host") == "[::1]:7000,host"


async def test_no_cluster_at_its_address_is_an_error_that_callers_expect():
    client = connect(f"redis+cluster://127.0.0.1:{free_ports(1)[0]}", RedisTimeouts(answer_s=1.0))
    with pytest.raises((RedisError, OSError)):
        async with asyncio.timeout(20):
            await client.get("x")
    await client.aclose()
