"""Numbers about samples: exact percentiles (every sample is kept), distribution curves, fairness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = NDArray[np.float64]
Summary: TypeAlias = dict[str, float | int | None]
PERCENTILES: Final = (("p50", 50.0), ("p90", 90.0), ("p95", 95.0), ("p99", 99.0), ("p99_9", 99.9))
# Even steps for the body, fine ones for the tail, where a p99.9 lives.
_CURVE: Final = np.concatenate([np.linspace(0, 0.98, 99), np.linspace(0.981, 0.999, 19), [0.9995, 1.0]])


def summarize(samples: Samples, scale: float = 1.0) -> Summary:
    """Count, mean, percentiles (linear between order statistics, as numpy and most load generators do) and maximum,
    times `scale`; None for each where there is no sample."""
    if not len(samples):
        return {"count": 0, "mean": None, **{name: None for name, _ in PERCENTILES}, "max": None}
    values = np.percentile(samples, [q for _, q in PERCENTILES]) * scale
    return {
        "count": len(samples),
        "mean": float(samples.mean() * scale),
        **{name: float(v) for (name, _), v in zip(PERCENTILES, values, strict=True)},
        "max": float(samples.max() * scale),
    }


def curve(samples: Samples, scale: float = 1.0) -> list[list[float]]:
    """The cumulative distribution as [value, share of samples at most that] points, for plots."""
    if not len(samples):
        return []
    values = np.quantile(samples, _CURVE) * scale
    return [[float(v), float(q)] for v, q in zip(values, _CURVE, strict=True)]


def jain_index(shares: Sequence[float]) -> float | None:
    """(Σx)²/(n·Σx²): 1 when all are equal, 1/n when one has all (Jain, Chiu, Hawe 1984). None without any share."""
    total = sum(shares)
    squares = sum(x * x for x in shares)
    return total * total / (len(shares) * squares) if squares else None
