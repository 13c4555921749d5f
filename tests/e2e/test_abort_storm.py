"""Whatever mix of requests ends or is given up, everything that they held is given back."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import psutil

from common.registry import blocks_key, host_blocks_key, reread_key, sequence_key, worker_key, workers_key
from tests.e2e.conftest import CLUSTER, Cluster, poll_until

NUM_REQUESTS = 200


async def one_request(client: httpx.AsyncClient, url: str, rng: random.Random, abort_after: int | None) -> str:
    body = {
        "model": "",
        "prompt": [rng.randrange(300, 40_000) for _ in range(rng.choice((1, 5, 16, 33, 120, 400, 900)))],
        "max_tokens": rng.choice((1, 2, 8, 24, 48)),
        "ignore_eos": True,
        "stream": True,
        "temperature": rng.choice((0, 0.8)),
    }
    finish = None
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        if abort_after == 0:
            return "aborted"
        chunks = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            finish = event["choices"][0]["finish_reason"] or finish
            chunks += 1
            if abort_after is not None and chunks >= abort_after:
                return "aborted"
    assert finish == "length"
    return "finished"


async def storm(url: str) -> list[str]:
    rng = random.Random(20)
    limit = asyncio.Semaphore(24)
    async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=64)) as client:

        async def guarded(index: int) -> str:
            seed = random.Random(index)
            aborts = index % 3 == 0
            async with limit:
                task = asyncio.ensure_future(
                    one_request(client, url, seed, seed.choice((0, 1, 2, 5, 11)) if aborts else None)
                )
                if aborts and index % 2:
                    # Cancelled by time rather than by progress: some before any byte of the answer.
                    _, pending = await asyncio.wait({task}, timeout=seed.uniform(0.0, 1.5))
                    if pending:
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                        return "aborted"
                return await task

        order = list(range(NUM_REQUESTS))
        rng.shuffle(order)
        return await asyncio.gather(*(guarded(i) for i in order))


def settled(cluster: Cluster) -> dict[str, dict[str, float]] | None:
    """Per worker its block counts, once no block, request, transfer or landing slot is held; None until then."""
    found = {}
    for worker in cluster.workers():
        gauges = cluster.gauges(worker.metrics_url)
        blocks = {s: gauges[f'baton_kv_blocks{{state="{s}"}}'] for s in ("free", "cached", "used")}
        held = ["baton_requests_running", "baton_requests_waiting", "baton_transfers_open"]
        if worker.role == "decode":
            held += [f'baton_transfer_landing_slots{{state="{s}"}}' for s in ("granted", "landing", "quarantined")]
        if blocks["used"] or any(gauges[name] for name in held):
            return None
        found[worker.worker_id] = {**blocks, "all": worker.num_blocks}
    return found


def keys_that_may_stay(cluster: Cluster) -> set[str]:
    """Those of workers that live, by their present epoch, and the list of live routers. A quota's or a load's key of a
    request is not among them."""
    of_epoch = (blocks_key, host_blocks_key, sequence_key, reread_key)
    own = {key(CLUSTER, w.worker_id, w.epoch) for w in cluster.workers() for key in of_epoch}
    own |= {worker_key(CLUSTER, w.worker_id) for w in cluster.workers()}
    return own | {workers_key(CLUSTER), f"baton:{{{CLUSTER}}}:routers"}


def counts(cluster: Cluster) -> dict[int, tuple[int, int]]:
    """pid → (threads, descriptors) of every process of the cluster."""
    return {p.pid: (p.num_threads(), p.num_fds()) for p in cluster.children()}


def test_two_hundred_requests_a_third_aborted_leave_nothing_behind(cluster):
    asyncio.run(storm_once(cluster.url))
    poll_until(lambda: settled(cluster), "an idle start", 60)
    before = counts(cluster)

    outcomes = asyncio.run(storm(cluster.url))
    assert outcomes.count("aborted") >= NUM_REQUESTS // 5
    assert outcomes.count("aborted") + outcomes.count("finished") == NUM_REQUESTS

    blocks = poll_until(lambda: settled(cluster), "every block to come back", 30)
    for worker_id, found in blocks.items():
        assert found["free"] + found["cached"] == found["all"], worker_id
    router = cluster.gauges(f"{cluster.url}/metrics")
    assert router["baton_requests_running"] == router["baton_requests_waiting"] == 0
    assert set(cluster.keys()) <= keys_that_may_stay(cluster), "no key is left over in Redis"
    poll_until(lambda: no_growth(before, counts(cluster)), f"threads and descriptors as before: {before}", 30)
    assert all(p.status() != psutil.STATUS_ZOMBIE for p in cluster.children())


async def storm_once(url: str) -> None:
    """Warm every lazily made thread and connection, so that the counts before are honest."""
    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(one_request(client, url, random.Random(i), None) for i in range(24)))


def no_growth(before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]) -> bool:
    # Pools that fill up, and the one channel by which the workers pull from each other, opened when a first prefix is
    # worth it, are no leak; a thing of each request, of each abort, or of each tenth of them is.
    slack = 16
    return before.keys() == after.keys() and all(
        a <= b + slack for pid in before for a, b in zip(after[pid], before[pid], strict=True)
    )
