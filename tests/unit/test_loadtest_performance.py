"""The performance page says who is ahead, whichever way a figure counts."""

from __future__ import annotations

import pytest

from loadtest.performance_cases import CASES, latency, output_rate
from loadtest.performance_page import ROWS, Run, render, write_page

REPORT = {
    "overall": {"latency_ms": {"itl": {"p50": 7.5}}, "throughput": {"output_tokens_per_s": 130.0}},
    "tenants": {"running": {"latency_ms": {"itl": {"p95": 21.0}}}},
}


def test_figures_are_read_from_the_whole_run_or_from_one_tenant():
    assert latency("itl", "p50")(REPORT) == 7.5
    assert latency("itl", "p95", "running")(REPORT) == 21.0
    assert output_rate(REPORT) == 130.0


def a_run(name, began, baton, peer, figures=tuple(row[0] for row in ROWS)):
    samples = {"Baton": {f: [baton, baton] for f in figures}, "peer": {f: [peer] for f in figures}}
    return Run(name, began, "cmd", {"cores": 2}, samples, {"peer": 0.0})


def rows_of(page):
    return {line.split(" | ")[0].lstrip("| "): line for line in page.splitlines() if line.startswith("| ")}


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_ratio_is_bold_exactly_where_baton_is_ahead(factor):
    rows = rows_of(render([a_run("r", "2026-01-01 00:00", 10.0 * factor, 10.0)]))
    for case in CASES:
        for figure in case.figures:
            row = rows[f"{case.title}: {figure.name} ({figure.unit})"]
            assert (f"**{factor:.2f}**" in row) == ((factor < 1) == figure.lower_is_better), row


def test_a_row_takes_both_figures_from_the_newest_run_that_has_them(tmp_path):
    name, unit, _ = ROWS[2]
    write_page(tmp_path, a_run("new", "2026-01-02 00:00", 3.0, 4.0, (name,)))
    rows = rows_of(write_page(tmp_path, a_run("old", "2026-01-01 00:00", 100.0, 200.0)).read_text())
    assert rows[f"{name} ({unit})"].split(" | ")[1:] == ["3", "4", "**0.75**", "new |"]
    others = [row for key, row in rows.items() if key not in (f"{name} ({unit})", "figure")]
    assert len(others) == len(ROWS) - 1
    assert all(row.endswith("| old |") for row in others)
