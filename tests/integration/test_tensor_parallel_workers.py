"""Workers whose model several processes share out: the same text, KV that any other worker takes, and no rank left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common.config import Settings
from common.embedded_redis import EmbeddedRedis
from common.errors import StartupError
from common.sampling_params import SamplingParams
from common.worker.loading import LoadedModel, load
from tests.processes import all_gone
from tests.tiny_model import make_tiny_model
from tests.unit.test_tensor_parallel import FAMILIES
from tests.worker_harness import RouterSession, generate, make_spec, reference, start_worker, worker

# All families × 2 and 4, and the default model, by hand: a minute or more on two cores.
ALL = bool(os.environ.get("BATON_TEST_ALL_SHARDS"))
CASES = [(family, size) for family in FAMILIES for size in (2, 4)] if ALL else [("mixtral", 4)]
IN_BETWEEN = """
import json, sys, time
from common.config import Settings
from common.worker.loading import load
loaded = load(Settings(**json.loads(sys.argv[1])))
print("ranks", *(process.pid for process in loaded.ranks._processes), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url


def settings(model: Path, redis_url: str, size: int) -> Settings:
    return Settings(
        model=str(model),
        redis_url=redis_url,
        dtype="float32",
        tensor_parallel=size,
        block_size=8,
        kv_cache_bytes=4 << 20,
        prefill_budget_tokens=48,
        num_threads=1,
        landing_slots=4,
        landing_slot_bytes=64 << 10,
        shutdown_grace_s=0.2,
    )


@pytest.fixture(scope="module")
def pair(tiny_model_folder: Path, redis_url: str) -> Iterator[dict[int, tuple[Settings, LoadedModel]]]:
    """The model in one process, and in two."""
    of = {size: settings(tiny_model_folder, redis_url, size) for size in (1, 2)}
    with load(of[1]) as one, load(of[2]) as two:
        yield {1: (of[1], one), 2: (of[2], two)}


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(2, 1), (1, 2)])
async def test_kv_of_one_number_of_ranks_is_gone_on_with_by_another(pair, prefill_size: int, decode_size: int) -> None:
    chance = random.Random(prefill_size)
    async with (
        worker("prefill", *pair[prefill_size]) as prefill,
        worker("decode", *pair[decode_size]) as decode,
        RouterSession(prefill.info) as p,
        RouterSession(decode.info) as d,
    ):
        for number, length in enumerate((1, 8, 100)):
            prompt = [chance.randrange(3, 300) for _ in range(length)]
            tokens, *_ = await generate(p, d, make_spec(f"t{number}", prompt, prefill.info, max_tokens=12))
            assert tokens == reference(pair[1][1], prompt, SamplingParams(max_tokens=12, temperature=0.0))
        await p.until_idle()
        await d.until_idle()


@pytest.mark.parametrize(("family", "size"), CASES)
async def test_ranks_give_the_text_of_one_process(tmp_path: Path, redis_url: str, family: str, size: int) -> None:
    await says_the_same(make_tiny_model(tmp_path, **FAMILIES[family]), redis_url, size)


@pytest.mark.skipif(not ALL, reason="BATON_TEST_ALL_SHARDS is not set")
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_ranks_give_the_text_of_one_process_with_the_real_model(
    model_folder: Path, redis_url: str, size: int
) -> None:
    await says_the_same(model_folder, redis_url, size)


async def says_the_same(folder: Path, redis_url: str, size: int) -> None:
    one, several = (settings(folder, redis_url, n).model_copy(update={"kv_cache_bytes": 64 << 20}) for n in (1, size))
    prompt = [random.Random(size).randrange(3, 300) for _ in range(70)]
    alone = load(one.model_copy(update={"kernels": "torch"}))
    with load(several) as group:
        async with (
            worker("prefill", one, alone) as prefill,
            worker("decode", several, group) as decode,
            RouterSession(prefill.info) as p,
            RouterSession(decode.info) as d,
        ):
            tokens, *_ = await generate(p, d, make_spec("t", prompt, prefill.info, max_tokens=20))
    assert tokens == reference(alone, prompt, SamplingParams(max_tokens=20, temperature=0.0))


async def test_a_rank_that_dies_ends_the_worker_with_a_line_that_names_it(
    tiny_model_folder: Path, redis_url: str
) -> None:
    of = settings(tiny_model_folder, redis_url, 2)
    with load(of) as loaded:
        running = await start_worker("decode", of, loaded)
        (process,) = loaded.ranks._processes
        process.kill()
        with pytest.raises(StartupError, match=rf"tensor-parallel rank 1 \(pid {process.pid}\) was killed by signal 9"):
            await running.task


def test_ranks_die_with_the_process_that_started_them(tiny_model_folder: Path) -> None:
    of = {"model": str(tiny_model_folder), "tensor_parallel": 2, "kv_cache_bytes": 4 << 20, "num_threads": 1}
    command = [sys.executable, "-c", IN_BETWEEN, json.dumps(of)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pids = next([int(pid) for pid in line.split()[1:]] for line in process.stdout if line.startswith("ranks"))
        assert len(pids) == 1
        assert all(map(psutil.pid_exists, pids))
        process.send_signal(signal.SIGKILL)
        assert all_gone(pids)


def test_a_rank_that_can_not_load_is_told_at_start(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.parallel.ranks.sys.executable", "/bin/false")
    of = Settings(model=str(tiny_model_folder), tensor_parallel=2, kv_cache_bytes=4 << 20)
    with pytest.raises(StartupError, match="tensor-parallel rank 1"):
        load(of)
