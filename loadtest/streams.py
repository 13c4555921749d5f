"""The streams of load that one run mixes: each has its own key, priority, class, arrivals and workload."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loadtest.arrivals import ARRIVAL_KINDS, Arrival, ArrivalKind
from loadtest.errors import BenchError
from loadtest.workloads.registry import describe_workload, parse_workload
from loadtest.workloads.session import Workload

_KEYS: Final = (
    "name",
    "class",
    "key",
    "priority",
    "salt",
    "weight",
    "rate",
    "arrival",
    "shape",
    "speed",
    "concurrency",
    "workload",
)


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """
    name: the tenant in the report. class_name: streams of one class are also reported together. priority: sent in the
    request body where set. cache_salt: sent where set. weight: share the tenant is entitled to, for the fairness index.
    """

    name: str
    arrival: Arrival
    workload: Workload
    class_name: str = "default"
    api_key: str = ""
    priority: str = ""
    cache_salt: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise BenchError(f"stream {self.name}: weight must be above 0, not {self.weight:g}")

    def at_rate(self, rate: float) -> StreamSpec:
        """The same stream with another mean rate."""
        return dataclasses.replace(self, arrival=dataclasses.replace(self.arrival, rate=rate))

    def describe(self) -> dict[str, object]:
        """For the report; the key stays out of it."""
        return {
            "name": self.name,
            "class": self.class_name,
            "priority": self.priority,
            "weight": self.weight,
            "arrival": self.arrival.describe(),
            "workload": describe_workload(self.workload),
        }


def make_arrival(
    kind: str | None, *, rate: float | None, shape: float, speed: float, concurrency: int | None, replays_trace: bool
) -> Arrival:
    """The arrival process that the given numbers mean: --concurrency alone is closed, --rate alone Poisson, neither
    with a trace its own times. Raises BenchError where they contradict each other."""
    if kind is None:
        if concurrency is not None:
            kind = "closed"
        elif rate is not None:
            kind = "poisson"
        elif replays_trace:
            kind = "trace"
        else:
            raise BenchError("no load given: --rate R (open loop) or --concurrency N (closed loop)")
    if kind not in ARRIVAL_KINDS:
        raise BenchError(f"arrival {kind!r} does not exist; there are {', '.join(ARRIVAL_KINDS)}")
    if concurrency is not None and kind != "closed":
        raise BenchError(f"--concurrency belongs to the closed loop, not to arrival {kind}")
    if rate is not None and kind in ("closed", "trace"):
        hint = "; --speed scales a trace" if kind == "trace" else ""
        raise BenchError(f"--rate does not go with arrival {kind}{hint}")
    if kind == "trace" and not replays_trace:
        raise BenchError("arrival trace needs a trace: --workload trace:path=FILE")
    arrival_kind: ArrivalKind = next(k for k in ARRIVAL_KINDS if k == kind)
    return Arrival(arrival_kind, rate=rate or 0.0, shape=shape, speed=speed, concurrency=concurrency or 0)


def parse_stream(text: str) -> StreamSpec:
    """`name=gold key=sk-1 rate=2 workload=fixed:input=64,output=16` → a stream. Raises BenchError naming the key."""
    values: dict[str, str] = {}
    try:
        items = shlex.split(text)
    except ValueError as e:
        raise BenchError(f"--stream {text!r}: {e}") from e
    for item in items:
        key, equals, value = item.partition("=")
        if key not in _KEYS or not equals:
            raise BenchError(f"--stream: {item!r} is not one of {', '.join(_KEYS)} (key=value, separated by blanks)")
        values[key] = value
    if "name" not in values:
        raise BenchError(f"--stream {text!r}: give it a name=…")
    workload_text = values.get("workload", "fixed")
    try:
        arrival = make_arrival(
            values.get("arrival"),
            rate=float(values["rate"]) if "rate" in values else None,
            shape=float(values.get("shape", 1.0)),
            speed=float(values.get("speed", 1.0)),
            concurrency=int(values["concurrency"]) if "concurrency" in values else None,
            replays_trace=workload_text.startswith("trace"),
        )
        weight = float(values.get("weight", 1.0))
    except ValueError as e:
        raise BenchError(f"--stream {values['name']}: {e}") from e
    return StreamSpec(
        name=values["name"],
        arrival=arrival,
        workload=parse_workload(workload_text),
        class_name=values.get("class", "default"),
        api_key=values.get("key", ""),
        priority=values.get("priority", ""),
        cache_salt=values.get("salt", ""),
        weight=weight,
    )


def check_streams(streams: Sequence[StreamSpec]) -> None:
    """Raises BenchError for two streams of one name: the report could not tell them apart."""
    names = [s.name for s in streams]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"--stream: two streams are called {name!r}; give each its own name")
