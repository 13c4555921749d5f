"""Baton's int8 and int4 beside llama.cpp's Q8_0 and Q4_0, which take about as many bits, and Baton's bfloat16.

    python -m loadtest.performance_quantized --model DIR --llama-server PATH --q8-0 FILE --q4-0 FILE [--repeat 3]

Writes docs/performance/quantized.md: the figures of one run, servers one after another (loadtest/performance.py).
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from loadtest.peers.servers import Server, baton, llama_cpp
from loadtest.performance import measure
from loadtest.performance_cases import CASES, MEMORY, READY
from loadtest.report.machine import describe_machine

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "performance" / "quantized.md"
_TITLES: Final = ("one stream, 128 in, 128 out", "16 streams, 256 in, 64 out", "prompt of 1,024 tokens")
COMPARED: Final = tuple(case for case in CASES if case.title in _TITLES)
# Baton's mode, and the peer of as many bits.
PAIRS: Final = (("Baton int8", "llama.cpp Q8_0"), ("Baton int4", "llama.cpp Q4_0"))
BASE: Final = "Baton bfloat16"


def servers(model: Path, llama_server: Path, q8_0: Path, q4_0: Path) -> list[Server]:
    def peer(name: str, gguf: Path) -> Server:
        return dataclasses.replace(llama_cpp(llama_server, gguf), name=name)

    return [
        baton(model, BASE),
        baton(model, "Baton int8", "--quantization", "int8"),
        peer("llama.cpp Q8_0", q8_0),
        baton(model, "Baton int4", "--quantization", "int4"),
        peer("llama.cpp Q4_0", q4_0),
    ]


def render(results: Mapping[str, Mapping[str, float]], command: str) -> str:
    """The page, from results by server and figure."""
    heads = [BASE, *(head for mine, peer in PAIRS for head in (mine, peer, "÷"))]
    machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
    lines = [
        "# Quantised weights beside llama.cpp's", "",
        f"Written by `{command}`, at {time.strftime('%Y-%m-%d %H:%M')}. "
        "[QUANTIZATION.md](../QUANTIZATION.md) says what the modes are and what they cost in accuracy.", "",
        f"Machine: {machine}. Model: SmolLM2-135M-Instruct. Baton is the whole disaggregated cluster, llama.cpp one "
        "process. ÷ is Baton's figure to the peer's in this run; **bold** where Baton is ahead.", "",
        f"| figure | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|",
    ]  # fmt: skip
    rows = [(READY, "s", True), (MEMORY, "GiB", True)]
    rows += [(f"{c.title}: {f.name}", f.unit, f.lower_is_better) for c in COMPARED for f in c.figures]
    for name, unit, lower in rows:
        cells = [f"{results[BASE][name]:,.4g}"]
        for mine, peer in PAIRS:
            ratio = results[mine][name] / results[peer][name]
            cells += [f"{results[server][name]:,.4g}" for server in (mine, peer)]
            cells.append(f"**{ratio:.2f}**" if (ratio < 1) == lower else f"{ratio:.2f}")
        lines.append(f"| {name} ({unit}) | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(
    model: Annotated[Path, typer.Option(help="Hugging Face folder")],
    llama_server: Annotated[Path, typer.Option(help="llama.cpp's server")],
    q8_0: Annotated[Path, typer.Option(help="GGUF of the same model in Q8_0")],
    q4_0: Annotated[Path, typer.Option(help="in Q4_0")],
    repeat: Annotated[int, typer.Option(min=1, help="measured runs a case")] = 3,
    output: Annotated[Path, typer.Option(help="page to write")] = PAGE,
) -> None:
    """Measure the five servers and write the table."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for server in servers(model, llama_server, q8_0, q4_0):
            results[server.name] = measure(server, COMPARED, repeat, Path(folder))
    command = "python -m loadtest.performance_quantized --model DIR --llama-server PATH --q8-0 FILE --q4-0 FILE"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(results, f"{command} --repeat {repeat}"))
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
