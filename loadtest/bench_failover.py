"""How long streams pause when their decode worker dies: `python -m loadtest.bench_failover`.

Two prefill and two decode workers; streams on both decode workers; one is killed (or stopped: it says nothing more and
its connections stay open). For each stream that it carried, the time from the signal to the next token; for the others,
their gaps between tokens in the second after it, beside those of the seconds before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from common.embedded_redis import EmbeddedRedis
from loadtest.answers import Answer, stream_completion
from loadtest.fleet import Fleet, free_port

PROMPT_TOKENS: Final = 128
MAX_TOKENS: Final = 400
# Tokens of every stream before the worker dies, and what counts as its normal pace.
WARM_TOKENS: Final = 40
SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass
class Result:
    """Seconds. failover_s: signal to next token, of each affected stream. normal_s, during_s: gaps of the others.
    num_broken: streams that did not end whole, or whose text was another than before.
    """

    failover_s: list[float] = field(default_factory=list)
    normal_s: list[float] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    num_broken: int = 0


async def all_streams(url: str, bodies: list[dict[str, Any]], answers: list[Answer]) -> list[Answer]:
    """answers: filled as they begin."""
    async with httpx.AsyncClient(timeout=300) as client:

        async def one(index: int) -> Answer:
            async def note(answer: Answer) -> None:
                answers[index] = answer

            return await stream_completion(client, url, bodies[index], note)

        return list(await asyncio.gather(*map(one, range(len(bodies)))))


async def disturbed(url: str, bodies: list[dict[str, Any]], fleet: Fleet, how: str) -> tuple[list[Answer], str, float]:
    """Answers, the worker that was hit, and when."""
    answers = [Answer(0.0) for _ in bodies]
    streams = asyncio.create_task(all_streams(url, bodies, answers))
    while min(answer.num_tokens for answer in answers) < WARM_TOKENS:
        await asyncio.sleep(0.02)
        if streams.done():
            raise SystemExit("the streams ended before the worker was hit: raise MAX_TOKENS")
    victim = max(fleet.workers("decode"), key=lambda name: num_running(fleet, name))
    at = time.monotonic()
    fleet.signal(victim, SIGNALS[how])
    return await streams, victim, at


def num_running(fleet: Fleet, name: str) -> float:
    record = fleet.record(name)
    if record is None:
        return 0.0
    with urllib.request.urlopen(record.metrics_url, timeout=5) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("baton_requests_running"))


def moved_ids(fleet: Fleet, at_line: int) -> set[str]:
    """Requests that the router tried again, by its log from at_line on."""
    return {e["request_id"] for e in fleet.logged("router-0")[at_line:] if e.get("event") == "request is tried again"}


def evaluate(result: Result, answers: list[Answer], clean: list[Answer], moved: set[str], at: float) -> None:
    for answer, undisturbed in zip(answers, clean, strict=True):
        times = [t for t, _ in answer.times]
        result.num_broken += answer.failure != "" or answer.content != undisturbed.content
        gaps = [(a, b - a) for a, b in pairwise(times)]
        if answer.request_id in moved:
            result.failover_s += [t - at for t in times if t > at][:1]
        else:
            result.normal_s += [gap for start, gap in gaps if at - 2.0 <= start < at - 0.1]
            result.during_s += [gap for start, gap in gaps if at - 0.02 <= start < at + 1.0]


def measure(fleet: Fleet, url: str, how: str, num_streams: int, rounds: int) -> Result:
    result = Result()
    for number in range(rounds):
        chance = random.Random(number)
        bodies = [
            {
                "prompt": [chance.randrange(300, 40_000) for _ in range(PROMPT_TOKENS)],
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "temperature": 0 if i % 2 else 0.9,
                "seed": i,
            }
            for i in range(num_streams)
        ]
        clean = asyncio.run(all_streams(url, bodies, [Answer(0.0) for _ in bodies]))
        line = len(fleet.logged("router-0"))
        answers, victim, at = asyncio.run(disturbed(url, bodies, fleet, how))
        evaluate(result, answers, clean, moved_ids(fleet, line), at)
        fleet.kill(victim)
        fleet.start(victim)
        fleet.wait_ready(victim)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="~/.cache/baton/models/SmolLM2-135M-Instruct")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--how", choices=[*SIGNALS, "both"], default="both")
    given = parser.parse_args()
    out = sys.stdout.write
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis() as redis:
        shared = {"model": Path(given.model).expanduser(), "kv_cache_bytes": 256 << 20, "num_threads": 1}
        fleet = Fleet(Path(folder), redis.url, "failover", shared)
        try:
            port = free_port()
            for role in ("prefill", "decode"):
                for index in (0, 1):
                    fleet.add(role, f"{role}-{index}")
            fleet.add("router", "router-0", port=port, auth="anonymous", target_itl_ms=1000)
            fleet.wait_ready()
            out("| | streams moved | signal to next token p50 / p95 | others' ITL p95 before / after | not whole |\n")
            out("|---|---|---|---|---|\n")
            for how in SIGNALS if given.how == "both" else (given.how,):
                r = measure(fleet, f"http://127.0.0.1:{port}", how, given.streams, given.rounds)
                p50, p95 = np.percentile(r.failover_s or [0.0], [50, 95]) * 1e3
                normal, during = (np.percentile(gaps or [0.0], 95) * 1e3 for gaps in (r.normal_s, r.during_s))
                ratio = f"{normal:.0f} / {during:.0f} ms, {during / max(normal, 1e-9):.2f} ×"
                out(f"| {how} | {len(r.failover_s)} | {p50:.0f} / {p95:.0f} ms | {ratio} | {r.num_broken} |\n")
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
