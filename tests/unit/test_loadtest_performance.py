"""The performance page says who is ahead, whichever way a figure counts."""

from __future__ import annotations

import pytest

from loadtest.performance import render
from loadtest.performance_cases import CASES, latency, output_rate

REPORT = {
    "overall": {"latency_ms": {"itl": {"p50": 7.5}}, "throughput": {"output_tokens_per_s": 130.0}},
    "tenants": {"running": {"latency_ms": {"itl": {"p95": 21.0}}}},
}


def test_figures_are_read_from_the_whole_run_or_from_one_tenant():
    assert latency("itl", "p50")(REPORT) == 7.5
    assert latency("itl", "p95", "running")(REPORT) == 21.0
    assert output_rate(REPORT) == 130.0


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_ratio_is_bold_exactly_where_baton_is_ahead(factor):
    names = ["ready after", "memory of all processes"]
    names += [f"{case.title}: {figure.name}" for case in CASES for figure in case.figures]
    page = render({"Baton": dict.fromkeys(names, 10.0 * factor), "peer": dict.fromkeys(names, 10.0)}, "cmd")
    rows = {line.split(" | ")[0].lstrip("| "): line for line in page.splitlines() if line.startswith("| ")}
    for case in CASES:
        for figure in case.figures:
            row = rows[f"{case.title}: {figure.name} ({figure.unit})"]
            assert (f"**{factor:.2f}**" in row) == ((factor < 1) == figure.lower_is_better), row
