"""What one tenant's flood does to another's time to first token: a real router, mock workers that take their time.

    python -m loadtest.bench_fairness [--rate 6000]

light   200-token prompts, Poisson arrivals at 30 % of what the prefill worker can do: alone, then beside
flood   as many at once as the router lets it have, each answered one followed by the next
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from loadtest.bench_router import Router, ask, start_baton

PROMPT_TOKENS = 200
LIGHT_LOAD = 0.3
LIGHT_REQUESTS = 150
FLOODERS = 300
NAMES = ("light", "flood")


async def light(router: Router, rate: float, key: str) -> list[float]:
    """TTFTs in seconds, sorted."""
    rng, tasks = random.Random(5), []
    for _ in range(LIGHT_REQUESTS):
        await asyncio.sleep(rng.expovariate(LIGHT_LOAD * rate / PROMPT_TOKENS))
        prompt = [rng.randrange(300, 20_000) for _ in range(PROMPT_TOKENS)]
        tasks.append(asyncio.create_task(ask(router, prompt, 1, key)))
    return sorted(await asyncio.gather(*tasks))


async def flood(router: Router, seed: int, key: str, counts: dict[str, int]) -> None:
    """Until cancelled. A refusal is tried again after a moment."""
    rng = random.Random(seed)
    while True:
        try:
            await ask(router, [rng.randrange(300, 20_000) for _ in range(PROMPT_TOKENS)], 1, key)
            counts["answered"] += 1
        except RuntimeError:
            counts["refused"] += 1
            await asyncio.sleep(0.2)


async def measure(router: Router, rate: float, keys: dict[str, str]) -> None:
    alone = await light(router, rate, keys["light"])
    counts = {"answered": 0, "refused": 0}
    started = time.monotonic()
    flooders = [asyncio.create_task(flood(router, seed, keys["flood"], counts)) for seed in range(FLOODERS)]
    await asyncio.sleep(2.0)
    beside = await light(router, rate, keys["light"])
    for task in flooders:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*flooders)
    elapsed_s = time.monotonic() - started
    out = sys.stdout.write
    out("| light tenant's TTFT | p50 ms | p95 ms |\n|---|---|---|\n")
    for name, ttfts in (("alone", alone), ("beside the flood", beside)):
        out(f"| {name} | {ttfts[len(ttfts) // 2] * 1e3:.0f} | {ttfts[int(len(ttfts) * 0.95)] * 1e3:.0f} |\n")
    p95 = int(len(alone) * 0.95)
    out(f"p95 ratio {beside[p95] / alone[p95]:.2f}; the flood had {counts['answered']} answers and {counts['refused']} "
        f"refusals in {elapsed_s:.0f} s\n")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="~/.cache/baton/models/SmolLM2-135M-Instruct")
    parser.add_argument("--rate", type=float, default=6000.0, help="prompt tokens/s of the mock prefill worker")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        tmp = Path(name)
        create = [sys.executable, "-m", "deploy.cli", "tenant", "create", "--tenants-file", str(tmp / "tenants.json")]
        keys = {tenant: subprocess.check_output([*create, tenant], text=True).strip() for tenant in NAMES}
        options = {"auth": "keys", "tenants_file": tmp / "tenants.json", "max_waiting": 256}
        folder = Path(given.model).expanduser()
        router = start_baton(stack, folder, tmp, prefill_rate=given.rate, **options)
        asyncio.run(measure(router, given.rate, keys))


if __name__ == "__main__":
    main()
