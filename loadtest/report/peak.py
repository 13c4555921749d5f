"""Inter-token gaps while as many streams were decoding as ever were at once: the server's full load, without the time
in which prompts were still computed or streams had ended already.

    stream 0   ┃first━━━━━━━━━━━━━━━━━━━━━━━last┃
    stream 1          ┃first━━━━━━━━━━━━━━━━━━━━━━━━━━━━last┃
    decoding   1      │2  counted           │  1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtest.record import RequestRecord
from loadtest.stats import Samples


def gaps_at_peak(records: Sequence[RequestRecord]) -> Samples:
    """Seconds; gaps that lie wholly in the spans of most streams. records: those that were served."""
    streams = [np.asarray(r.events_s) for r in records if len(r.events_s) > 1]
    spans = _peak_spans(streams)
    gaps = [np.diff(times)[_within(times, spans)] for times in streams]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _peak_spans(streams: Sequence[Samples]) -> list[tuple[float, float]]:
    """Where the number of streams between first and last event is at its highest. An end comes before a start."""
    steps = sorted([(float(s[0]), 1) for s in streams] + [(float(s[-1]), -1) for s in streams])
    counts = np.cumsum([change for _, change in steps])
    peak = counts.max(initial=0)
    return [(steps[i][0], steps[i + 1][0]) for i in range(len(steps) - 1) if counts[i] == peak]


def _within(times: Samples, spans: Sequence[tuple[float, float]]) -> np.ndarray:
    """Of each gap, whether it lies in one of the spans. Shape [len(times) - 1], bool."""
    inside = np.zeros(len(times) - 1, np.bool_)
    for start, end in spans:
        inside |= (times[:-1] >= start) & (times[1:] <= end)
    return inside
