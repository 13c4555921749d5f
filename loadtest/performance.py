"""Regenerates docs/PERFORMANCE.md: every end-to-end figure, Baton beside its peers, on this machine and in one run.

    python -m loadtest.performance --model DIR [--vllm VENV] [--llama-server PATH] [--repeat 3]

Servers run one after another, never together; each case is measured `repeat` times by `baton bench` and the median is
kept. What a figure should reach is stated against the peer of the same run, since machines differ and drift.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import psutil
import typer

from loadtest.report.machine import describe_machine

READY_DEADLINE_S: Final = 300.0
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "PERFORMANCE.md"
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a report. lower_is_better decides which way a ratio counts."""

    name: str
    unit: str
    read: Callable[[Report], float]
    lower_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    title: str
    arguments: Sequence[str]
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True)
class Server:
    """How a server under test is started on `port`; environment is added to this process's own."""

    name: str
    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    max_model_len: int = 8192


def latency(kind: str, percentile: str, tenant: str | None = None) -> Callable[[Report], float]:
    def read(report: Report) -> float:
        group = report["overall"] if tenant is None else report["tenants"][tenant]
        return float(group["latency_ms"][kind][percentile])

    return read


def output_rate(report: Report) -> float:
    return float(report["overall"]["throughput"]["output_tokens_per_s"])


TTFT_P50: Final = Figure("TTFT p50", "ms", latency("ttft", "p50"))
ITL_P50: Final = Figure("ITL p50", "ms", latency("itl", "p50"))
RATE: Final = Figure("output", "tokens/s", output_rate, lower_is_better=False)
CASES: Final = (
    Case(
        "one stream, 128 in, 128 out",
        ("--concurrency", "1", "--requests", "4", "--workload", "fixed:input=128,output=128"),
        (ITL_P50, RATE),
    ),
    Case(
        "16 streams, 256 in, 64 out",
        ("--concurrency", "16", "--requests", "48", "--workload", "fixed:input=256,output=64"),
        (RATE, ITL_P50, TTFT_P50, Figure("TTFT p95", "ms", latency("ttft", "p95"))),
    ),
    Case(
        "prompt of 1,024 tokens",
        ("--concurrency", "1", "--requests", "5", "--workload", "fixed:input=1024,output=2"),
        (TTFT_P50,),
    ),
    Case(
        "prompt of 4,096 tokens",
        ("--concurrency", "1", "--requests", "3", "--workload", "fixed:input=4096,output=2"),
        (TTFT_P50,),
    ),
    Case(
        "16 users sharing a 1,024-token prefix",
        ("--concurrency", "16", "--requests", "64", "--workload", "shared-prefix:prefix=1024,input=32,output=16"),
        (TTFT_P50,),
    ),
    Case(
        "8 running streams while 4,096-token prompts arrive",
        (
            "--duration", "20",
            "--stream", "name=running concurrency=8 workload=fixed:input=64,output=256",
            "--stream", "name=arriving concurrency=1 workload=fixed:input=4096,output=1",
        ),
        (Figure("their ITL p95", "ms", latency("itl", "p95", "running")),),
    ),
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, psutil.Process, float]]:
    """The server's URL, its process and how many seconds it took to answer; stopped, with its children, at the end."""
    port, started = free_port(), time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            server.command(port), stdout=out, stderr=out, env={**os.environ, **server.environment}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while not _answers(url, server.name):
            if process.poll() is not None or time.monotonic() - started > READY_DEADLINE_S:
                raise SystemExit(f"{server.name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid), time.monotonic() - started
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str, name: str) -> bool:
    path = "/ready" if name.startswith("Baton") else "/health"
    try:
        with urllib.request.urlopen(url + path, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def bench(url: str, case: Case, server: Server, seed: int, folder: Path) -> Report:
    """One run of `baton bench`; its prompts differ from every other run's, so that no cache knows them."""
    output = folder / "run.json"
    command = [
        sys.executable, "-m", "deploy.cli", "bench", "run", "--url", url, "--no-progress", "--seed", str(seed),
        "--vocab-size", "49000", "--max-model-len", str(server.max_model_len), "-o", str(output), *case.arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{case.title} on {server.name}: {done.stderr.strip()[-500:]}")
    report: Report = json.loads(output.read_text())
    return report


def measure(server: Server, cases: Sequence[Case], repeat: int, folder: Path) -> dict[str, float]:
    """Figure ("case: name") → median."""
    samples: dict[str, list[float]] = {}
    with running(server, folder / "server.log") as (url, process, ready_s):
        samples["ready after"] = [ready_s]
        for number in range(repeat + 1):  # the first round warms caches, clocks and lazily made threads
            for index, case in enumerate(cases):
                report = bench(url, case, server, 1000 * number + index, folder)
                if number == 0:
                    continue
                for figure in case.figures:
                    samples.setdefault(f"{case.title}: {figure.name}", []).append(figure.read(report))
                typer.echo(f"{server.name} {number}/{repeat} {case.title}", err=True)
        samples["memory of all processes"] = [_unique_bytes(process) / 2**30]
    return {name: statistics.median(values) for name, values in samples.items()}


def _unique_bytes(process: psutil.Process) -> int:
    """Proportional set size of the process and its children: what is shared counts once."""
    return sum(p.memory_full_info().pss for p in [process, *process.children(recursive=True)])


def render(results: Mapping[str, Mapping[str, float]], command: str, notes: str) -> str:
    """The page, from results by server and figure; the first server is Baton, the others are its peers."""
    names = list(results)
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    lines = [
        "# Performance", "", f"Made by `{command}` and by nothing else: run it again to renew the page.", "",
        f"Machine: {machine}. Model: SmolLM2-135M-Instruct, bfloat16. Baton is the whole disaggregated cluster "
        "(router, one prefill, one decode worker, Redis); each peer is one process with both phases. The ratio is "
        "Baton's figure to the peer's in the same run; **bold** where Baton is ahead.", "",
        "| figure | " + " | ".join(names) + "".join(f" | ÷ {peer}" for peer in names[1:]) + " |",
        "|---" * (2 * len(names)) + "|",
    ]  # fmt: skip
    rows = [("ready after", "s", True), ("memory of all processes", "GiB", True)]
    rows += [(f"{c.title}: {f.name}", f.unit, f.lower_is_better) for c in CASES for f in c.figures]
    for name, unit, lower in rows:
        mine = results[names[0]][name]
        cells = [f"{results[server][name]:,.4g}" for server in names]
        for peer in names[1:]:
            ratio = mine / results[peer][name]
            cells.append(f"**{ratio:.2f}**" if (ratio < 1) == lower else f"{ratio:.2f}")
        lines.append(f"| {name} ({unit}) | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", notes.strip(), ""])


def servers(model: Path, vllm: Path | None, llama_server: Path | None) -> list[Server]:
    baton = [sys.executable, "-m", "deploy.cli", "serve", "--no-demo", "--model", str(model), "--dtype", "bfloat16"]
    found = [
        Server("Baton", lambda port: [*baton, "--port", str(port)]),
        Server("Baton, phases in one worker", lambda port: [*baton, "--port", str(port), "--prefill", "0"]),
    ]
    if vllm is not None:
        preload = ":".join(map(str, [*Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"), vllm / "lib/libiomp5.so"]))
        environment = {"LD_PRELOAD": preload, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
        options = ["--dtype", "bfloat16", "--max-model-len", "8192", "--host", "127.0.0.1"]
        program = [str(vllm / "bin" / "vllm"), "serve", str(model), *options]
        found.append(Server("vLLM", lambda port: [*program, "--port", str(port)], environment))
    if llama_server is not None:
        gguf = next(model.glob("*.gguf"), model / "model-bf16.gguf")
        args = [str(llama_server), "-m", str(gguf), "-t", "2", "-tb", "2", "-np", "16", "-c", "81920"]
        found.append(Server("llama.cpp", lambda port: [*args, "--host", "127.0.0.1", "--port", str(port)]))
    return found


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face folder, e.g. what `baton model fetch` printed")],
    vllm: Annotated[Path | None, typer.Option(help="virtual environment with vllm-cpu")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama-server, with a GGUF in the model folder")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="measured runs a case")] = 3,
) -> None:
    """Measure everything and write docs/PERFORMANCE.md; what follows its `## Notes` line is kept."""
    notes = PAGE.read_text().partition("\n## Notes\n")[2] if PAGE.exists() else ""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for server in servers(model, vllm, llama_server):
            results[server.name] = measure(server, CASES, repeat, Path(folder))
    given = ["--model DIR", f"--repeat {repeat}"] + ["--vllm VENV"] * (vllm is not None)
    given += ["--llama-server PATH"] * (llama_server is not None)
    PAGE.write_text(render(results, f"python -m loadtest.performance {' '.join(given)}", f"## Notes\n{notes}"))
    typer.echo(f"wrote {PAGE}")


if __name__ == "__main__":
    typer.run(main)
