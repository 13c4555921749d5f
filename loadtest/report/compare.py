"""Two runs side by side: schema `baton.bench.compare/1`."""

from __future__ import annotations

from typing import Any, Final, Literal

from loadtest.errors import BenchError
from loadtest.report.run_report import RUN_SCHEMA

COMPARE_SCHEMA: Final = "baton.bench.compare/1"
# Below this a difference is noise on most machines.
_SAME: Final = 0.02
Better = Literal["lower", "higher"]

_ROWS: Final[tuple[tuple[str, str, str, tuple[str, ...], Better], ...]] = (
    *(
        (group, name.replace("_", "."), "ms", ("latency_ms", key, name), "lower")
        for group, key in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))
        for name in ("mean", "p50", "p90", "p95", "p99", "p99_9")
    ),
    ("Throughput", "requests", "1/s", ("throughput", "requests_per_s"), "higher"),
    ("Throughput", "input tokens", "1/s", ("throughput", "input_tokens_per_s"), "higher"),
    ("Throughput", "output tokens", "1/s", ("throughput", "output_tokens_per_s"), "higher"),
    ("Throughput", "goodput", "1/s", ("goodput", "requests_per_s"), "higher"),
    ("Outcome", "requests within the objective", "%", ("goodput", "fraction"), "higher"),
    ("Outcome", "failed requests", "", ("requests", "failed"), "lower"),
    ("Outcome", "prefix cache hits", "%", ("cache", "hit_ratio"), "higher"),
)


def compare_reports(name_a: str, a: dict[str, Any], name_b: str, b: dict[str, Any]) -> dict[str, Any]:
    """Raises BenchError for anything but two run reports of a known schema."""
    for name, report in ((name_a, a), (name_b, b)):
        if report.get("schema") != RUN_SCHEMA:
            raise BenchError(f"{name}: schema is {report.get('schema')!r}, compare needs {RUN_SCHEMA!r}")
    rows = []
    for group, label, unit, path, better in _ROWS:
        left, right = _value(a["overall"], path), _value(b["overall"], path)
        if left is None and right is None:
            continue
        if unit == "%":
            left, right = (None if v is None else v * 100 for v in (left, right))
        change = (right - left) / left if left and right is not None else None
        verdict = _verdict(left, right, better)
        rows.append(
            {"group": group, "name": label, "unit": unit, "a": left, "b": right, "change": change, "verdict": verdict}
        )
    return {
        "schema": COMPARE_SCHEMA,
        "rows": rows,
        "warnings": _warnings(a, b),
        "runs": [{"name": name_a, "report": a}, {"name": name_b, "report": b}],
    }


def _value(overall: Any, path: tuple[str, ...]) -> float | None:
    value = overall
    for key in path:
        if value is None:
            return None
        value = value.get(key)
    return None if value is None else float(value)


def _verdict(left: float | None, right: float | None, better: Better) -> str:
    if left is None or right is None or left == right:
        return "same"
    if left and abs(right - left) / abs(left) < _SAME:
        return "same"
    return "better" if (right < left) == (better == "lower") else "worse"


def _warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What makes the two runs less comparable than they look."""
    warnings = []
    if a["machine"]["cpu"] != b["machine"]["cpu"] or a["machine"]["cores"] != b["machine"]["cores"]:
        warnings.append("The runs are from different machines.")
    loads = [[(s["arrival"], s["workload"]) for s in r["config"]["streams"]] for r in (a, b)]
    if loads[0] != loads[1]:
        warnings.append("The runs had different loads.")
    if a["config"]["slo"] != b["config"]["slo"]:
        warnings.append("The runs had different objectives: goodput is not comparable.")
    return warnings
