"""What docs/performance tells: the loads, and which numbers of their reports are figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Report = Mapping[str, Any]
READY: Final = "ready after"
MEMORY: Final = "memory of all processes"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a report. lower_is_better decides which way a ratio counts."""

    name: str
    unit: str
    read: Callable[[Report], float]
    lower_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """arguments: of `baton bench run`. warm_up: what replaces some of them in the run that is not measured."""

    title: str
    arguments: Sequence[str]
    figures: Sequence[Figure]
    warm_up: Sequence[str]


def latency(kind: str, percentile: str, tenant: str | None = None) -> Callable[[Report], float]:
    def read(report: Report) -> float:
        group = report["overall"] if tenant is None else report["tenants"][tenant]
        return float(group["latency_ms"][kind][percentile])

    return read


def output_rate(report: Report) -> float:
    return float(report["overall"]["throughput"]["output_tokens_per_s"])


TTFT_P50: Final = Figure("TTFT p50", "ms", latency("ttft", "p50"))
ITL_P50: Final = Figure("ITL p50", "ms", latency("itl", "p50"))
ITL_AT_PEAK: Final = Figure("ITL p50 once all are decoding", "ms", latency("itl_at_peak", "p50"))
RATE: Final = Figure("output", "tokens/s", output_rate, lower_is_better=False)
CASES: Final = (
    Case(
        "one stream, 128 in, 128 out",
        ("--concurrency", "1", "--requests", "4", "--workload", "fixed:input=128,output=128"),
        (ITL_P50, RATE),
        ("--requests", "1"),
    ),
    Case(
        "16 streams, 256 in, 64 out",
        ("--concurrency", "16", "--requests", "48", "--workload", "fixed:input=256,output=64"),
        (RATE, ITL_AT_PEAK, ITL_P50, TTFT_P50, Figure("TTFT p95", "ms", latency("ttft", "p95"))),
        ("--requests", "16"),
    ),
    Case(
        "16 prompts at once, 256 in",
        ("--concurrency", "16", "--requests", "16", "--workload", "fixed:input=256,output=64"),
        (TTFT_P50,),
        ("--requests", "4"),
    ),
    Case(
        "prompt of 1,024 tokens",
        ("--concurrency", "1", "--requests", "5", "--workload", "fixed:input=1024,output=2"),
        (TTFT_P50,),
        ("--requests", "1"),
    ),
    Case(
        "prompt of 4,096 tokens",
        ("--concurrency", "1", "--requests", "3", "--workload", "fixed:input=4096,output=2"),
        (TTFT_P50,),
        ("--requests", "1"),
    ),
    Case(
        "16 users sharing a 1,024-token prefix",
        ("--concurrency", "16", "--requests", "64", "--workload", "shared-prefix:prefix=1024,input=32,output=16"),
        (TTFT_P50,),
        ("--requests", "16"),
    ),
    Case(
        "8 running streams while 4,096-token prompts arrive",
        (
            "--duration", "20",
            "--stream", "name=running concurrency=8 workload=fixed:input=64,output=256",
            "--stream", "name=arriving concurrency=1 workload=fixed:input=4096,output=1",
        ),
        (Figure("their ITL p95", "ms", latency("itl", "p95", "running")),),
        ("--duration", "4"),
    ),
)  # fmt: skip
