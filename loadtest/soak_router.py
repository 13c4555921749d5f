"""Whether a router's memory stays flat: many requests, no two with a common prefix, mock workers.

    python -m loadtest.soak_router [--requests 200000]

The first WARM_UP of them fill what is bounded by number (timelines, library caches); from there RSS may grow by 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from loadtest.bench_router import Router, ask, start_baton

WARM_UP = 4000
CONCURRENCY = 16
PROMPT_TOKENS = 64
MAX_GROWTH = 0.02


async def send(router: Router, first: int, number: int) -> None:
    """Requests first … first + number − 1; each begins with its own number."""
    left = iter(range(first, first + number))
    rng = random.Random(first)

    async def client() -> None:
        for i in left:
            prompt = [300 + i % 997, 300 + i // 997, *(rng.randrange(300, 20_000) for _ in range(PROMPT_TOKENS))]
            await ask(router, prompt, 2)

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="~/.cache/baton/models/SmolLM2-135M-Instruct")
    parser.add_argument("--requests", type=int, default=200_000, help="after the warm-up")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        router = start_baton(stack, Path(given.model).expanduser(), Path(name))
        asyncio.run(send(router, 0, WARM_UP))
        before = router.process.memory_info().rss
        for part in range(10):
            asyncio.run(send(router, WARM_UP + part * (given.requests // 10), given.requests // 10))
            rss = router.process.memory_info().rss
            sys.stdout.write(
                f"{(part + 1) * given.requests // 10} requests: {rss >> 20} MiB, {rss / before - 1:+.2%}\n"
            )
            sys.stdout.flush()
    sys.exit(0 if rss <= before * (1 + MAX_GROWTH) else 1)


if __name__ == "__main__":
    main()
