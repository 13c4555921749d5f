"""How fast the prefix index answers, and what a block costs: the router's client, the worker's writer, a real Redis.

    python -m loadtest.bench_index --trace mooncake_conversation.jsonl

Workers' sets are filled with the trace's prompts, dealt round, until the index has --blocks entries. Then the trace's
prompts are looked up on all workers: open loop at --rate, whose latencies are from the planned start on (a client that
falls behind shows), and closed loop with --clients at once, which tells the ceiling. Client and Redis share a machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from common.embedded_redis import EmbeddedRedis
from common.kvcache.block_hash import HASH_BYTES
from common.redis_client import RedisTimeouts, connect
from common.registry import WorkerRecord
from common.worker.block_tiers import Batch
from common.worker.index_writer import IndexWriter
from loadtest.traces import MOONCAKE_BLOCK_TOKENS, TraceEntry, read_trace
from router.cluster.prefix_index import PrefixIndex

BLOCK_TOKENS: Final = 16
CLUSTER: Final = "bench"
EPOCH: Final = "e"
LEASE_MS: Final = 3_600_000
# The router gives up sooner; here each look-up is waited for, so that none escapes the percentiles.
ANSWER_S: Final = 30.0
_HASHES_A_BLOCK: Final = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Latencies:
    """rate: look-ups a second. Milliseconds."""

    rate: float
    p50_ms: float
    p99_ms: float
    max_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description="prefix index: look-ups a second, latencies, bytes a block")
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="entries in the index")
    parser.add_argument("--rate", type=float, default=1000.0, help="look-ups a second in the open loop")
    parser.add_argument("--lookups", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3, help="rounds; a machine that others use differs between them")
    parser.add_argument("--clients", type=int, default=4, help="at once in the closed loop")
    uvloop.run(run(parser.parse_args()))


async def run(arguments: argparse.Namespace) -> None:
    entries = [e for e in read_trace(arguments.trace) if e.block_ids]
    async with bench_index(arguments.workers) as (index, records, writers, used_bytes):
        before = await used_bytes()
        started = time.perf_counter()
        num_blocks = await fill(entries, writers, arguments.blocks)
        fill_s = time.perf_counter() - started
        bytes_a_block = (await used_bytes() - before) / num_blocks
        prompts = [packed_chain(e) for _, e in zip(range(arguments.lookups), _round(entries), strict=False)]
        mean_tokens = sum(map(len, prompts)) / len(prompts) / HASH_BYTES * BLOCK_TOKENS
        _say(
            f"{num_blocks:,} entries of {arguments.workers} workers, written in {fill_s:.1f} s "
            f"({num_blocks / fill_s:,.0f}/s); {bytes_a_block:.1f} bytes of Redis each"
        )
        _say(f"prompts: {len(prompts)}, mean {mean_tokens:,.0f} tokens; every look-up asks for all workers")

        async def look_up(prompt: bytes) -> None:
            if await index.lookup(records, prompt) is None:
                raise RuntimeError("the index gave no answer: Redis failed")

        longest = b"".join(prompts)[: 32_768 // BLOCK_TOKENS * HASH_BYTES]
        for _ in range(arguments.repeat):
            _tell(f"open loop, {arguments.rate:g}/s planned", await open_loop(look_up, prompts, arguments.rate))
            _tell(f"closed loop, {arguments.clients} at once", await closed_loop(look_up, prompts, arguments.clients))
            _tell("32k-token prompt, one at a time", await closed_loop(look_up, [longest] * 500, 1))


_Bench = tuple[PrefixIndex, list[WorkerRecord], list[IndexWriter], Callable[[], Awaitable[int]]]


@asynccontextmanager
async def bench_index(num_workers: int) -> AsyncIterator[_Bench]:
    """The router's index and one writer a worker, on a Redis of their own; and how many bytes that Redis uses."""
    with EmbeddedRedis() as server:
        redis = connect(server.url, RedisTimeouts())
        ids = [f"w{i}" for i in range(num_workers)]
        writers = [IndexWriter(redis, CLUSTER, worker_id, EPOCH, LEASE_MS) for worker_id in ids]

        async def used_bytes() -> int:
            return int((await redis.info("memory"))["used_memory"])

        try:
            yield PrefixIndex(redis, CLUSTER, time.monotonic, ANSWER_S), [_record(i) for i in ids], writers, used_bytes
        finally:
            await redis.aclose()


async def fill(entries: Sequence[TraceEntry], writers: Sequence[IndexWriter], num_blocks: int) -> int:
    """Deals prompts to the workers until there are so many entries; returns how many there are."""
    held: list[set[bytes]] = [set() for _ in writers]
    total = 0
    for number, entry in enumerate(entries):
        chain = packed_chain(entry)
        worker = held[number % len(writers)]
        before = len(worker)
        worker.update(chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES))
        total += len(worker) - before
        if total >= num_blocks:
            break
    for writer, hashes in zip(writers, held, strict=True):
        await writer.rewrite(Batch((), list(hashes), (), ()))
    return total


def packed_chain(entry: TraceEntry) -> bytes:
    """Made-up hashes of the prompt's full blocks, equal where the trace's prefixes are."""
    whole = b"".join(_hashes_of(block_id) for block_id in entry.block_ids)
    return whole[: entry.input_tokens // BLOCK_TOKENS * HASH_BYTES]


_LookUp = Callable[[bytes], Awaitable[None]]


async def open_loop(look_up: _LookUp, prompts: Sequence[bytes], rate: float) -> Latencies:
    clock = time.perf_counter
    begin = clock()
    seconds: list[float] = []

    async def one(planned_at: float, prompt: bytes) -> None:
        await look_up(prompt)
        seconds.append(clock() - planned_at)

    tasks = []
    for number, prompt in enumerate(prompts):
        planned_at = begin + number / rate
        if (wait_s := planned_at - clock()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(planned_at, prompt)))
    await asyncio.gather(*tasks)
    return _latencies(seconds, clock() - begin)


async def closed_loop(look_up: _LookUp, prompts: Sequence[bytes], clients: int) -> Latencies:
    clock = time.perf_counter
    begin = clock()
    seconds: list[float] = []

    async def client(mine: Sequence[bytes]) -> None:
        for prompt in mine:
            started = clock()
            await look_up(prompt)
            seconds.append(clock() - started)

    await asyncio.gather(*(client(prompts[i::clients]) for i in range(clients)))
    return _latencies(seconds, clock() - begin)


def _latencies(seconds: Sequence[float], elapsed_s: float) -> Latencies:
    p50, p99 = (float(np.percentile(seconds, q)) * 1e3 for q in (50, 99))
    return Latencies(len(seconds) / elapsed_s, p50, p99, max(seconds) * 1e3)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _tell(what: str, found: Latencies) -> None:
    _say(
        f"{what}: {found.rate:,.0f} look-ups/s, p50 {found.p50_ms:.2f} ms, p99 {found.p99_ms:.2f} ms, "
        f"max {found.max_ms:.1f} ms"
    )


def _round(entries: Sequence[TraceEntry]) -> Iterator[TraceEntry]:
    while True:
        yield from entries


def _hashes_of(block_id: int) -> bytes:
    digests = (blake2b(f"{block_id}.{i}".encode(), digest_size=64).digest() for i in range(_HASHES_A_BLOCK // 4))
    return b"".join(digests)


def _record(worker_id: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id, epoch=EPOCH, role="prefill", grpc_address="", model_name="", model_fingerprint="",
        dtype="", block_size=BLOCK_TOKENS, num_blocks=0, max_model_len=0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
