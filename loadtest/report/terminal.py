"""Reports as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99_9", "max")
_METRICS = (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2e", "E2E"))


def number(value: float | None) -> str:
    """Three significant digits or so; – for none."""
    if value is None:
        return "–"
    size = abs(value)
    if value == round(value) and size < 100:
        return f"{value:.0f}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def print_run(report: dict[str, Any], console: Console) -> None:
    overall = report["overall"]
    console.print(_latency_table(overall))
    console.print(Text("\n".join(_summary_lines(report))))
    for key, title in (("tenants", "tenant"), ("classes", "class")):
        if len(report[key]) > 1:
            console.print(_group_table(report[key], title))
    console.print(_verdict(report))


def print_saturate(report: dict[str, Any], console: Console) -> None:
    table = _table("rate", "", "within", "goodput", "served", "tok/s", "TTFT p95", "ITL p95", "E2E p95")
    table.columns[1].justify = "left"
    for p in report["probes"]:
        verdict = "client" if not p["valid"] else "ok" if p["passed"] else "missed"
        table.add_row(
            number(p["rate_per_s"]),
            Text(verdict, style="green" if verdict == "ok" else "red"),
            percent(p["fraction"]),
            *(number(p[k]) for k in ("goodput_per_s", "throughput_per_s", "output_tokens_per_s")),
            *(number(p[k]) for k in ("ttft_p95_ms", "itl_p95_ms", "e2e_p95_ms")),
        )
    console.print(table)
    limits = ", ".join(f"{k.removesuffix('_ms')} ≤ {v:g} ms" for k, v in report["search"]["slo"].items())
    best = report["best_rate_per_s"]
    found = f"{number(best)} requests/s" if best else "no rate"
    console.print(
        Text(
            f"highest rate with {report['search']['fraction']:.0%} of requests within {limits}: {found}"
            f" ({report['search']['ended']})",
            style="bold",
        )
    )


def print_compare(report: dict[str, Any], console: Console) -> None:
    for warning in report["warnings"]:
        console.print(Text(warning, style="yellow"))
    a, b = (run["name"] for run in report["runs"])
    table = _table("", f"A: {a}", f"B: {b}", "B against A", "")
    group = ""
    for row in report["rows"]:
        if row["group"] != group:
            group = row["group"]
            table.add_section()
        change = "–" if row["change"] is None else f"{row['change']:+.1%}"
        style = {"better": "green", "worse": "red"}.get(row["verdict"], "")
        verdict = "" if row["verdict"] == "same" else f"B {row['verdict']}"
        name = f"{row['group']} {row['name']}" if row["group"] not in ("Outcome", "Throughput") else row["name"]
        unit = f", {row['unit']}" if row["unit"] else ""
        table.add_row(
            f"{name}{unit}", number(row["a"]), number(row["b"]), Text(change, style=style), Text(verdict, style=style)
        )
    console.print(table)


def _table(*columns: str) -> Table:
    """Narrow enough for 80 columns: the first column is text, the others are figures."""
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    return table


def _latency_table(overall: dict[str, Any]) -> RenderableType:
    table = _table("ms", *(c.replace("_", ".") for c in _COLUMNS), "samples")
    for key, label in _METRICS:
        summary = overall["latency_ms"][key]
        table.add_row(label, *(number(summary[c]) for c in _COLUMNS), f"{summary['count']:,}")
    return table


def _summary_lines(report: dict[str, Any]) -> list[str]:
    overall = report["overall"]
    requests, rates, tokens = overall["requests"], overall["throughput"], overall["tokens"]
    lines = [
        f"requests    {requests['ok']:,} served, {requests['failed']:,} failed, {requests['cancelled']:,} cancelled"
        f" in {report['span_s']:.1f} s: {number(rates['requests_per_s'])}/s",
        f"tokens      in {number(rates['input_tokens_per_s'])}/s, out {number(rates['output_tokens_per_s'])}/s",
    ]
    if tokens["short_answers"]:
        lines.append(f"answers     {tokens['short_answers']:,} shorter than asked for")
    if goodput := overall["goodput"]:
        limits = ", ".join(f"{k.removesuffix('_ms')} ≤ {v:g} ms" for k, v in goodput["slo"].items())
        lines.append(
            f"goodput     {number(goodput['requests_per_s'])}/s, {goodput['fraction']:.1%} of requests within {limits}"
        )
    if cache := overall["cache"]:
        lines.append(f"cache       {cache['hit_ratio']:.1%} of prompt tokens were cached")
    if fairness := report["fairness"]:
        lines.append(
            f"fairness    Jain {number(fairness['jain_demand_met'])} on demand served,"
            f" {number(fairness['jain_service'])} on weighted tokens"
        )
    for kind, count in overall["errors"].items():
        lines.append(f"error       {count:,} × {kind}: {overall['error_examples'][kind]}")
    return lines


def _group_table(groups: dict[str, Any], title: str) -> RenderableType:
    table = _table(title, "served", "failed", "req/s", "tok/s", "TTFT p50/p95", "ITL p50/p95", "goodput")
    for name, overall in groups.items():
        latency, goodput = overall["latency_ms"], overall["goodput"]
        table.add_row(
            name,
            f"{overall['requests']['ok']:,}",
            f"{overall['requests']['failed']:,}",
            number(overall["throughput"]["requests_per_s"]),
            number(overall["throughput"]["output_tokens_per_s"]),
            *(f"{number(latency[m]['p50'])}/{number(latency[m]['p95'])}" for m in ("ttft", "itl")),
            percent(goodput["fraction"]) if goodput else "–",
        )
    return table


def _verdict(report: dict[str, Any]) -> RenderableType:
    validity, client = report["validity"], report["client"]
    lines = [Text(f"note: {note}", style="yellow") for note in validity["notes"]]
    lines += [Text(f"RESULT INVALID: {reason}", style="bold red") for reason in validity["reasons"]]
    lines.append(
        Text(
            f"client: sent {number(client['send_lag_ms']['p50'])} ms late at the median,"
            f" {number(client['send_lag_ms']['p99'])} ms at p99; {percent(client['cpu_ratio']['mean'])} of a core",
            style="dim",
        )
    )
    return Group(*lines)
