"""The two sides' statistics as Prometheus families, read when somebody asks. Every label's values are a closed set.

All values of a label are shown from the start, at zero: a rate over a series that first appears at 1 misses that 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.errors import ErrorKind
from kv_transfer.landing_ring import SlotState
from kv_transfer.lender import Lender
from kv_transfer.puller import PullStats
from kv_transfer.state import IncomingState, OutgoingState, is_final
from kv_transfer.stats import Dropped, ReceiverStats, SenderStats

# Why a transfer can fail; another kind would show as soon as it happens.
FAILURE_REASONS: Final = (
    ErrorKind.LEASE_LOST,
    ErrorKind.STALE_EPOCH,
    ErrorKind.CORRUPT_KV,
    ErrorKind.DEADLINE_EXCEEDED,
    ErrorKind.DRAINING,
    ErrorKind.CANCELLED,
    ErrorKind.INTERNAL,
)


class SenderCollector(Collector):
    """Of a prefill worker. stats: called in the scraper's thread. num_staging_slots: all of them."""

    def __init__(self, stats: Callable[[], SenderStats], num_staging_slots: int) -> None:
        self._stats = stats
        self._num_staging_slots = num_staging_slots

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from _common(
            stats,
            "put, resends included",
            stats.bytes_sent,
            stats.pieces_sent,
            [s for s in OutgoingState if is_final(s)],
        )
        yield CounterMetricFamily(
            "baton_transfer_pieces_resent", "Pieces put again after a refusal", stats.pieces_resent
        )
        slots = {"free": stats.free_staging_slots, "used": self._num_staging_slots - stats.free_staging_slots}
        yield _labelled(GaugeMetricFamily, "baton_transfer_staging_slots", "Slots of the staging pool", "state", slots)
        yield GaugeMetricFamily("baton_transfer_channels", "Decode workers with an open channel", len(stats.lanes))
        yield _lanes(stats.lanes.values())


class ReceiverCollector(Collector):
    """Of a decode worker. stats: called in the scraper's thread."""

    def __init__(self, stats: Callable[[], ReceiverStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        finals = [s for s in IncomingState if is_final(s)]
        yield from _common(stats, "landed and verified", stats.bytes_landed, stats.pieces_landed, finals)
        yield CounterMetricFamily(
            "baton_transfer_pieces_rejected", "Pieces that failed verification", stats.pieces_rejected
        )
        slots = {state.value: stats.slots.get(state.value, 0) for state in SlotState}
        yield _labelled(GaugeMetricFamily, "baton_transfer_landing_slots", "Slots of the landing ring", "state", slots)
        yield GaugeMetricFamily("baton_transfer_channels", "Prefill workers with an open channel", stats.num_channels)
        yield CounterMetricFamily(
            "baton_transfer_refused_handshakes", "Channels refused for format or epoch", stats.refused_handshakes
        )


class PullCollector(Collector):
    """Of any worker. pulls: of one that pulls. lender: of one that is asked."""

    def __init__(self, pulls: PullStats | None, lender: Lender) -> None:
        self._pulls = pulls
        self._lender = lender

    def collect(self) -> Iterable[Metric]:
        answers = {"granted": self._lender.num_granted, "refused": self._lender.num_refused}
        text = "Requests of other workers for cached blocks"
        yield _labelled(CounterMetricFamily, "baton_pull_requests", text, "answer", answers)
        if (pulls := self._pulls) is None:
            return
        yield CounterMetricFamily("baton_pulls", "Pulls of a prefix that were begun", pulls.started)
        failed = dict.fromkeys(map(str, FAILURE_REASONS), 0) | {str(kind): n for kind, n in pulls.failed.items()}
        text = "Pulls that brought nothing: the prefix was computed, by kind of error (deadline_exceeded: too slow)"
        yield _labelled(CounterMetricFamily, "baton_pull_failures", text, "reason", failed)
        yield CounterMetricFamily("baton_pulled_tokens", "Tokens whose KV was pulled, not computed", pulls.tokens)
        yield CounterMetricFamily("baton_pulled_bytes", "KV bytes that pulls brought", pulls.bytes)


def _common(
    stats: SenderStats | ReceiverStats, what: str, num_bytes: int, num_pieces: int, finals: Sequence[str]
) -> Iterable[Metric]:
    yield CounterMetricFamily("baton_transfer_bytes", f"KV bytes {what}", num_bytes)
    yield CounterMetricFamily("baton_transfer_pieces", "Pieces of KV that were moved: what one put carries", num_pieces)
    yield GaugeMetricFamily("baton_transfers_open", "Transfers that have not ended", stats.open_transfers)
    ended = {str(state): stats.ended.get(state, 0) for state in finals}
    yield _labelled(CounterMetricFamily, "baton_transfers", "Transfers that have ended, by final state", "state", ended)
    failed = dict.fromkeys(map(str, FAILURE_REASONS), 0) | {str(kind): n for kind, n in stats.failed.items()}
    text = "Transfers that ended without a commit, by kind of error"
    yield _labelled(CounterMetricFamily, "baton_transfer_failures", text, "reason", failed)
    dropped = {str(reason): stats.dropped_frames.get(reason, 0) for reason in Dropped}
    text = "Frames that were counted and not acted upon"
    yield _labelled(CounterMetricFamily, "baton_transfer_dropped_frames", text, "reason", dropped)


def _labelled(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, int],
) -> Metric:
    made = family(name, text, labels=[label])
    for value, number in sorted(values.items()):
        made.add_metric([value], number)
    return made


def _lanes(peers: Iterable[tuple[str, ...]]) -> Metric:
    """Transport and device of each lane that some channel uses; devices are this machine's, so there are few."""
    text = "What the transport chose to reach the decode workers; always 1"
    family = GaugeMetricFamily("baton_transfer_lanes_info", text, labels=["transport", "device"])
    for lane in sorted({lane for lanes in peers for lane in lanes}):
        transport, _, device = lane.partition("/")
        family.add_metric([transport, device], 1)
    return family
