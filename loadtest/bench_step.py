"""Where the time of a decode step goes in a running cluster: CPU time of each thread and process, a step of 16 streams.

    python -m loadtest.bench_step --model DIR [--streams 16] [--output-tokens 512]

Streams start with short prompts and run long, so that nearly all that is counted is decoding. Steps are counted by
tokens: one of each stream. What the cores were not used for is what no thread could do meanwhile.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer

from loadtest.peers.servers import baton
from loadtest.performance import bench, running
from loadtest.performance_cases import Case

KERNELS: Final = "baton-kernels"


def cpu_by_part(processes: Sequence[psutil.Process]) -> Mapping[str, float]:
    """Seconds of CPU so far: of the decode worker by thread, of all others by process."""
    used: dict[str, float] = defaultdict(float)
    for process in [each for root in processes for each in (root, *root.children(recursive=True))]:
        words = process.cmdline()
        role = next((role for role in ("decode", "prefill", "router") if role in words), "supervisor and Redis")
        if role != "decode":
            used[role] += sum(process.cpu_times()[:2])
            continue
        others = []
        for thread in process.threads():
            seconds = thread.user_time + thread.system_time
            if thread.id == process.pid:
                used["decode: event loop"] += seconds
            elif _name(process.pid, thread.id) == KERNELS:
                used["decode: helper thread of the kernels"] += seconds
            else:
                others.append(seconds)
        used["decode: engine's thread, kernels included"] += max(others)
        used["decode: other threads"] += sum(others) - max(others)
    return used


def _name(pid: int, thread_id: int) -> str:
    return Path(f"/proc/{pid}/task/{thread_id}/comm").read_text().strip()


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face folder")],
    streams: Annotated[int, typer.Option(min=1)] = 16,
    output_tokens: Annotated[int, typer.Option(min=1)] = 512,
) -> None:
    """Measure and print the table."""
    workload = f"fixed:input=64,output={output_tokens}"
    arguments = ("--concurrency", str(streams), "--requests", str(streams), "--workload", workload)
    case = Case("decode steps", arguments, (), ())
    server = baton(model)
    with tempfile.TemporaryDirectory() as scratch, running(server, Path(scratch) / "log") as (url, processes, _):
        bench(url, case, server, 1, Path(scratch), ("--workload", "fixed:input=64,output=16"))
        before, began, own = cpu_by_part(processes), time.monotonic(), _children_s()
        report = bench(url, case, server, 2, Path(scratch))
        wall_s = time.monotonic() - began
        used = {part: seconds - before.get(part, 0.0) for part, seconds in cpu_by_part(processes).items()}
        used["load generator, its start included"] = _children_s() - own
    peak_ms = report["overall"]["latency_ms"]["itl_at_peak"]["p50"]
    typer.echo(f"{streams} streams, {output_tokens} steps: ITL p50 {peak_ms:.2f} ms once all are decoding")
    typer.echo(f"{'':50}{'ms of CPU a step':>18}")
    for part, seconds in sorted(used.items(), key=lambda item: -item[1]):
        typer.echo(f"{part:50}{1e3 * seconds / output_tokens:18.2f}")
    unused_s = wall_s * (os.cpu_count() or 1) - sum(used.values())
    typer.echo(f"{'cores not used, the start included':50}{1e3 * unused_s / output_tokens:18.2f}")


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    typer.run(main)
