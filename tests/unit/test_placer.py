"""The placer joins fleet, index and its own memory: a burst stays together, and Redis' absence does not scatter it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest

from router.cluster.fleet import Fleet
from router.cluster.prefix_index import CachedPrefix
from router.placer import INDEX_LAG_S, Placer
from router.policy.transfer_rate import TransferRate
from tests.fakes.router_parts import PlayedWorker

BLOCK = 16
CHAIN = b"".join(i.to_bytes(16, "big") for i in range(40))


class PlayedIndex:
    """Holds what the test puts in; `away` as when Redis is."""

    def __init__(self) -> None:
        self.held: dict[str, CachedPrefix] = {}
        self.away = False

    async def lookup(self, workers, packed_hashes):
        if self.away:
            return None
        return [self.held.get(w.worker_id, CachedPrefix(0, 0)) for w in workers]


class Bench:
    def __init__(self, num_prefill: int = 4, num_decode: int = 2, local_max: int = 0) -> None:
        self.now = 100.0
        self.index = PlayedIndex()
        fleet = Fleet("r", time.monotonic)
        self.workers = [PlayedWorker(f"p{i}", "prefill") for i in range(num_prefill)]
        self.workers += [PlayedWorker(f"d{i}", "decode") for i in range(num_decode)]
        for worker in self.workers:
            fleet._members[worker.session.record.worker_id] = SimpleNamespace(session=worker.session)
        self.placer = Placer(fleet, self.index, BLOCK, local_max, TransferRate(), lambda: self.now)

    async def place(self, chain: bytes = CHAIN, num_tokens: int = 650):
        return await self.placer.place(num_tokens, chain)


async def test_the_second_request_of_a_burst_follows_the_first_before_the_index_knows():
    bench = Bench()
    first = await bench.place()
    for _ in range(10):
        again = await bench.place()
        assert again.prefill is first.prefill
        assert again.predicted_cached_tokens == 640
    assert (await bench.place(chain=CHAIN[::-1])).predicted_cached_tokens == 0, "another prompt has nothing to follow"


async def test_what_the_index_should_know_by_now_is_the_indexs_to_say():
    bench = Bench(num_prefill=8)
    await bench.place()
    bench.now += 60.0 + INDEX_LAG_S
    assert (await bench.place()).predicted_cached_tokens == 0, "it was evicted, says the index"


async def test_while_redis_is_away_prompts_go_where_this_router_sent_them_before():
    bench = Bench()
    first = await bench.place()
    bench.now += 600.0
    bench.index.away = True
    for _ in range(10):
        pair = await bench.place()
        assert pair.prefill is first.prefill
        assert pair.predicted_cached_tokens is None, "nobody may blame the index"


async def test_what_a_lost_incarnation_was_sent_is_forgotten_with_it():
    bench = Bench(num_prefill=1)
    await bench.place()
    bench.index.away = True
    session = bench.workers[0].session
    session.record = msgspec.structs.replace(session.record, epoch="e2")
    assert (await bench.place()).uncached_prefill_tokens == 650


@pytest.mark.parametrize(("held", "local"), [(39, True), (0, False)])
async def test_a_mostly_cached_prompt_stays_with_its_decode_worker(held, local):
    bench = Bench(num_prefill=1, num_decode=1, local_max=64)
    bench.index.held = {"d0": CachedPrefix(held, held), "p0": CachedPrefix(0, 0)}
    pair = await bench.place()
    assert (pair.prefill is None) == local
    assert pair.uncached_prefill_tokens == 650 - held * BLOCK
    assert pair.predicted_ttft_s > 0


async def test_the_host_tiers_part_of_a_prefix_counts_as_cached_but_not_as_there():
    bench = Bench(num_prefill=2, num_decode=1)
    bench.index.held = {"p0": CachedPrefix(40, 10), "p1": CachedPrefix(20, 20)}
    pair = await bench.place()
    assert pair.prefill.record.worker_id == "p0"
    assert pair.predicted_cached_tokens == 640
    bench = Bench(num_prefill=2, num_decode=1)
    bench.index.held = {"p0": CachedPrefix(40, 10), "p1": CachedPrefix(40, 40)}
    assert (await bench.place()).prefill.record.worker_id == "p1"


async def test_a_prefill_worker_is_told_who_holds_more_of_the_prompt_and_lends_it():
    bench = Bench(num_prefill=3, num_decode=1)
    for worker in bench.workers:
        record = worker.session.record
        lends = record.worker_id != "p2"
        worker.session.record = msgspec.structs.replace(record, pull_secret=b"s".hex() * 16 if lends else "")
    bench.index.held = {"p0": CachedPrefix(20, 20), "p1": CachedPrefix(30, 5), "p2": CachedPrefix(39, 39)}
    bench.workers[1].session.subscribe("busy", object(), prefill_tokens=50_000)
    bench.workers[2].session.subscribe("busy", object(), prefill_tokens=50_000)
    pair = await bench.place()
    assert pair.prefill.record.worker_id == "p0"
    assert [(s.worker.worker_id, s.worker.epoch, s.num_tokens, s.secret) for s in pair.pull_sources] == [
        ("p1", "e1", 480, b"s" * 16)
    ]
