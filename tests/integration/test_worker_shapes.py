"""Prefill and decode worker with blocks of different sizes: real gRPC, UCX and Redis, and the text stays the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.sampling_params import SamplingParams
from common.worker.loading import load
from tests.worker_harness import RouterSession, generate, make_spec, reference, worker


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


def settings(model: Path, redis_url: str, block_size: int) -> Settings:
    return Settings(
        model=str(model),
        redis_url=redis_url,
        block_size=block_size,
        kv_cache_bytes=1 << 20,
        prefill_budget_tokens=48,
        max_running=16,
        num_threads=1,
        landing_slots=4,
        landing_slot_bytes=64 << 10,
        shutdown_grace_s=0.2,
    )


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 32), (32, 16), (8, 24), (20, 12)])
async def test_blocks_of_another_size_give_the_same_text(
    tiny_model_folder: Path, redis_url: str, prefill_size: int, decode_size: int
) -> None:
    ours, theirs = (settings(tiny_model_folder, redis_url, size) for size in (prefill_size, decode_size))
    model = load(ours)
    chance = random.Random(prefill_size)
    async with (
        worker("prefill", ours, model) as prefill,
        worker("decode", theirs, load(theirs)) as decode,
        RouterSession(prefill.info) as p,
        RouterSession(decode.info) as d,
    ):
        previous: list[int] = []
        for number, length in enumerate((1, 31, 64, 100, 37)):
            prompt = [*previous, *(chance.randrange(3, 300) for _ in range(length))]
            tokens, _, leg = await generate(p, d, make_spec(f"t{number}", prompt, prefill.info))
            assert tokens == reference(model, prompt, SamplingParams(max_tokens=8, temperature=0.0))
            # A next turn: what the decode worker holds of it ends amid a block of the prefill worker's.
            previous = [*prompt, *tokens] if number in (1, 2) else []
            assert leg.last.num_cached_tokens % decode_size == 0
        await p.until_idle()
        await d.until_idle()
