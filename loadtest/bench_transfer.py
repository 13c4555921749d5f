"""`baton bench transfer`: how fast KV moves between two workers, beside memcpy, raw sockets and NIXL, in one run.

    python -m loadtest.bench_transfer [--nixl VENV/bin/python] [--output FILE.json]

"Baton" is the whole way: gathered out of one KV cache, sent, verified, scattered into the other's, committed. "Baton
put" ends in the other's landing ring, as NIXL's WRITE ends in the other's memory: what a message can be compared by.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadtest.report.machine import describe_machine
from loadtest.transfer.bench import NETWORKS, TransferOptions, measure_case, measure_interference, ring_text
from loadtest.transfer.cases import CASES, MIB

SCHEMA = "baton.bench.transfer/1"


def main(
    nixl: Annotated[Path | None, typer.Option(help="python of a venv with NIXL (pip install nixl-cu12)")] = None,
    nixl_package: Annotated[str, typer.Option(help="cu12 for nixl-cu12, else nixl")] = "cu12",
    network: Annotated[str, typer.Option(help="only 'same host' or 'tcp'")] = "",
    only: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
    rounds: Annotated[int, typer.Option(help="turns that each peer takes in a case")] = 3,
    budget_s: Annotated[float, typer.Option(help="seconds of a turn")] = 0.5,
    slots: Annotated[int, typer.Option(help="slots of Baton's landing ring")] = 16,
    slot_mib: Annotated[int, typer.Option(help="MiB of a landing slot")] = 4,
    rows: Annotated[bool, typer.Option(help="measure rates")] = True,
    interference: Annotated[bool, typer.Option(help="measure small transfers beside a large one, and idleness")] = True,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="also write JSON", metavar="FILE")] = None,
) -> None:
    """Measure how fast KV moves between two processes of this host, beside memcpy, raw sockets and NIXL.

    \b
    Examples:
      baton bench transfer --network "same host"
      baton bench transfer --nixl ~/nixl-venv/bin/python -o transfer.json
    """
    options = TransferOptions(str(nixl) if nixl else None, nixl_package, rounds, budget_s, slots, slot_mib * MIB)
    console = Console()
    report: dict[str, Any] = {"schema": SCHEMA, "machine": describe_machine(), "ring": ring_text(options), "rows": []}
    chosen = [case for case in CASES if only in case.name] if rows else []
    for where in [name for name in NETWORKS if network in name]:
        for case in chosen:
            report["rows"].append(measure_case(case, where, options))
    if chosen:
        console.print(_table(report["rows"]))
    if interference:
        found = measure_interference(options)
        report.update(found)
        console.print_json(json.dumps(found))
    if output is not None:
        output.write_text(json.dumps(report, indent=1))


def _table(rows: list[dict[str, Any]]) -> Table:
    peers, ratios = list(rows[0]["gb_per_s"]), list(rows[0]["ratios"])
    table = Table("case", "network", *(f"{peer} GB/s" for peer in peers), *ratios)
    for row in rows:
        figures = [f"{row['gb_per_s'][peer]:.2f}" for peer in peers]
        table.add_row(row["case"], row["network"], *figures, *(f"{row['ratios'][ratio]:.2f}" for ratio in ratios))
    return table


if __name__ == "__main__":
    typer.run(main)
