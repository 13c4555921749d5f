"""docs/performance/table.md, from the runs that docs/performance/runs keeps: a table a peer, each row of one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from loadtest.performance_cases import CASES, MEMORY, READY

FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "performance"
BATON: Final = "Baton"
# Figure, unit, whether less is better.
ROWS: Final = (
    (READY, "s", True),
    (MEMORY, "GiB", True),
    *((f"{case.title}: {each.name}", each.unit, each.lower_is_better) for case in CASES for each in case.figures),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One invocation of loadtest.performance. began: local time. samples: server → figure → value of each round.

    idle_cores: server → cores it used while others had their turn.
    """

    name: str
    began: str
    command: str
    machine: Mapping[str, str | int | float]
    samples: Mapping[str, Mapping[str, Sequence[float]]]
    idle_cores: Mapping[str, float]


def write_page(folder: Path, run: Run) -> Path:
    """Keep `run`, in place of an earlier one of its name, and write the page from all that are kept."""
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    (runs / f"{run.name}.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
    page = folder / "table.md"
    page.write_text(render([Run(**json.loads(path.read_text())) for path in sorted(runs.glob("*.json"))]))
    return page


def render(runs: Sequence[Run]) -> str:
    """The page. Of several runs with a figure of the same peer, the one that began last counts."""
    lines = [
        "# Baton beside its peers", "",
        "Written by `loadtest/performance_page.py` from the runs in [runs/](runs/). "
        "[PERFORMANCE.md](../PERFORMANCE.md) says what the figures mean. ÷ is Baton's figure to the peer's in the "
        "row's run; **bold** where Baton is ahead. Each figure is the median of its run's rounds.",
    ]  # fmt: skip
    newest_first = sorted(runs, key=lambda run: run.began, reverse=True)
    peers = dict.fromkeys(server for run in runs for server in run.samples if server != BATON)
    for peer in peers:
        lines += ["", f"## {peer}", f"| figure | {BATON} | {peer} | ÷ | run |", "|---|---|---|---|---|"]
        for row in ROWS:
            found = [run for run in newest_first if all(row[0] in run.samples.get(s, {}) for s in (BATON, peer))]
            if found:
                lines.append(_row(row, found[0], peer))
    return "\n".join([*lines, "", "## Runs", *map(_description, sorted(runs, key=lambda run: run.began)), ""])


def _row(row: tuple[str, str, bool], run: Run, peer: str) -> str:
    name, unit, lower = row
    mine, theirs = (statistics.median(run.samples[server][name]) for server in (BATON, peer))
    ratio = mine / theirs
    shown = f"**{ratio:.2f}**" if (ratio < 1) == lower else f"{ratio:.2f}"
    return f"| {name} ({unit}) | {mine:,.4g} | {theirs:,.4g} | {shown} | {run.name} |"


def _description(run: Run) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in run.machine.items())
    idle = ", ".join(f"{server} {cores:.2f}" for server, cores in run.idle_cores.items())
    return f"- **{run.name}**, {run.began}: `{run.command}`. Machine: {machine}. Cores used while idle: {idle}."
