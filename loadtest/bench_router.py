"""What a router costs: CPU time of its process a request and a streamed token, beside peers', in one run.

    python -m loadtest.bench_router [--sglang VENV/bin/python] [--litellm VENV/bin/litellm]

              client ──► router under test ──► mock workers          (each a process of its own)
    requests  400-word prompts, one token each, 8 at a time          CPU / request
    tokens    32 streams, a token each 20 ms                         (CPU − the requests' share) / token

Baton tokenizes prompts, its peers pass bytes through; so the time of tokenizing is measured by itself and shown apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from common.embedded_redis import EmbeddedRedis
from common.model.fingerprint import model_fingerprint
from common.model.tokenizer import Tokenizer

CLUSTER = "cost"
WORDS = 400
REQUESTS, CONCURRENCY = 400, 8
STREAMS, TOKENS, GAP_S = 32, 200, 0.02
START_DEADLINE_S = 90.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds and microseconds of CPU; request_ms without tokenizing. p99_ms: TTFT at CONCURRENCY."""

    name: str
    request_ms: float
    tokenize_ms: float
    token_us: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Router:
    name: str
    port: int
    model: str
    process: psutil.Process
    tokenize_ms: float = 0.0

    def cpu_s(self) -> float:
        """Of it and its children, all threads."""
        times = [p.cpu_times() for p in (self.process, *self.process.children(recursive=True))]
        return sum(t.user + t.system for t in times)


def prompt(rng: random.Random) -> str:
    return " ".join(rng.choice(_VOCABULARY) for _ in range(WORDS))


_VOCABULARY = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
]


async def ask(router: Router, text: str | list[int], max_tokens: int, key: str = "sk-1") -> float:
    """One streamed completion; returns TTFT in seconds. Raises RuntimeError for anything but a whole answer."""
    body = {"model": router.model, "prompt": text, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1 << 20)
    try:
        fields = f"host: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n"
        head = f"POST /v1/completions HTTP/1.1\r\n{fields}"
        started = time.perf_counter()
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
        status = await asyncio.wait_for(reader.readline(), 60)
        if b" 200 " not in status:
            raise RuntimeError(f"{router.name}: {status!r} {(await reader.read(2000))!r}")
        await reader.readuntil(b"data: ")
        ttft_s = time.perf_counter() - started
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 120)
        return ttft_s
    finally:
        writer.close()


async def run_requests(router: Router, number: int, concurrency: int, max_tokens: int) -> list[float]:
    rng, left = random.Random(number), iter(range(number))
    ttfts: list[float] = []

    async def client() -> None:
        for _ in left:
            ttfts.append(await ask(router, prompt(rng), max_tokens))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return sorted(ttfts)


async def measure(router: Router) -> Cost:
    await run_requests(router, 50, CONCURRENCY, 1)
    before = router.cpu_s()
    ttfts = await run_requests(router, REQUESTS, CONCURRENCY, 1)
    request_s = (router.cpu_s() - before) / REQUESTS
    token_s = []
    for _ in range(3):
        before = router.cpu_s()
        await run_requests(router, STREAMS, STREAMS, TOKENS)
        token_s.append((router.cpu_s() - before - STREAMS * request_s) / (STREAMS * (TOKENS - 1)))
    return Cost(
        router.name,
        request_s * 1e3 - router.tokenize_ms,
        router.tokenize_ms,
        statistics.median(token_s) * 1e6,
        ttfts[len(ttfts) // 2] * 1e3,
        ttfts[int(len(ttfts) * 0.99)] * 1e3,
    )


# -- the routers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(stack: ExitStack, command: Sequence[str], log: Path, **environment: str) -> psutil.Process:
    with log.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment})
    stack.callback(child.wait, 10)
    stack.callback(child.terminate)
    return psutil.Process(child.pid)


def wait_ready(url: str, process: psutil.Process, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        try:
            opener.open(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{url} does not answer; its log ends:\n{log.read_text(errors='replace')[-2000:]}")


def start_baton(stack: ExitStack, folder: Path, tmp: Path, *, prefill_rate: float = 0.0, **settings: object) -> Router:
    """prefill_rate: tokens/s of the mock prefill worker; 0: at once. settings: of the router."""
    redis = stack.enter_context(EmbeddedRedis())
    workers = [redis.url, CLUSTER, model_fingerprint(folder), str(GAP_S), str(prefill_rate)]
    start(stack, [sys.executable, "-m", "loadtest.router_cost.mock_workers", *workers], tmp / "workers.log")
    port, log = free_port(), tmp / "baton.log"
    options = {"redis_url": redis.url, "cluster": CLUSTER, "model": folder, "port": port, "auth": "anonymous"}
    options |= {"target_itl_ms": 1000, "log_level": "error", **settings}
    pairs = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    process = start(stack, [sys.executable, "-m", "deploy.cli", "router", *pairs], log)
    wait_ready(f"http://127.0.0.1:{port}/ready", process, log)
    return Router("Baton", port, folder.name, process, tokenize_ms(folder))


def tokenize_ms(folder: Path) -> float:
    """Mean CPU time of a prompt's tokenizing, by itself."""
    tokenizer, rng = Tokenizer(folder), random.Random(1)
    texts = [prompt(rng) for _ in range(300)]
    tokenizer.encode(texts[0], True)
    started = time.process_time()
    for text in texts:
        tokenizer.encode(text, True)
    return (time.process_time() - started) / len(texts) * 1e3


def start_mock_openai(stack: ExitStack, tmp: Path) -> int:
    port, log = free_port(), tmp / "mock.log"
    process = start(stack, [sys.executable, "-m", "loadtest.router_cost.mock_openai", str(port), str(GAP_S)], log)
    wait_ready(f"http://127.0.0.1:{port}/v1/models", process, log)
    return port


def start_sglang(stack: ExitStack, python: str, tmp: Path) -> Router:
    worker, port, log = start_mock_openai(stack, tmp), free_port(), tmp / "sglang.log"
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{worker}", "--policy", "cache_aware", "--log-level", "warn"]
    command += ["--prometheus-port", str(free_port())]
    process = start(stack, command, log)
    wait_ready(f"http://127.0.0.1:{port}/v1/models", process, log)
    return Router("sglang-router", port, "mock", process)


def start_litellm(stack: ExitStack, program: str, tmp: Path) -> Router:
    worker, port, log = start_mock_openai(stack, tmp), free_port(), tmp / "litellm.log"
    config = tmp / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: mock\n  litellm_params:\n    model: text-completion-openai/mock\n"
        f"    api_base: http://127.0.0.1:{worker}/v1\n    api_key: none\n"
    )
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    process = start(stack, command, log, LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR",
                    LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true")  # fmt: skip
    wait_ready(f"http://127.0.0.1:{port}/health/liveliness", process, log)
    return Router("LiteLLM proxy", port, "mock", process)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="~/.cache/baton/models/SmolLM2-135M-Instruct")
    parser.add_argument("--sglang", default="", help="python of a virtual environment that has sglang-router")
    parser.add_argument("--litellm", default="", help="the litellm program of a virtual environment")
    given = parser.parse_args()
    folder = Path(given.model).expanduser()
    out = sys.stdout.write
    out("| router | CPU ms a request | of tokenizing, besides | CPU µs a token | TTFT p50 / p99 ms |\n")
    out("|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        starts: list[Callable[[ExitStack], Router]] = [partial(start_baton, folder=folder, tmp=tmp)]
        if given.sglang:
            starts.append(partial(start_sglang, python=os.path.expanduser(given.sglang), tmp=tmp))
        if given.litellm:
            starts.append(partial(start_litellm, program=os.path.expanduser(given.litellm), tmp=tmp))
        for begin in starts:
            with ExitStack() as stack:
                r = asyncio.run(measure(begin(stack)))
            tokenizing = f"{r.tokenize_ms:.2f} ms" if r.tokenize_ms else "–"
            ttft = f"{r.p50_ms:.1f} / {r.p99_ms:.1f}"
            out(f"| {r.name} | {r.request_ms:.2f} | {tokenizing} | {r.token_us:.1f} | {ttft} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
