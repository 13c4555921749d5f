"""What a worker publishes to the prefix index, read at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.worker.registry_publisher import RegistryPublisher, SnapshotReason


class PublisherCollector(Collector):
    """Reads counts of the event loop's from the metrics server's thread: each is one number, a moment old."""

    def __init__(self, publisher: RegistryPublisher) -> None:
        self._publisher = publisher

    def collect(self) -> Iterator[Metric]:
        publisher = self._publisher
        text = "Blocks of this worker that the prefix index has, in any tier"
        yield GaugeMetricFamily("baton_prefix_index_blocks", text, publisher.num_indexed_blocks)
        text = "Blocks that index_max_blocks left no room for in the prefix index"
        yield CounterMetricFamily("baton_prefix_index_left_out_blocks", text, publisher.num_left_out)
        text = "Times that all of this worker's index entries were written anew"
        family = CounterMetricFamily("baton_prefix_index_snapshots", text, labels=["reason"])
        for reason in SnapshotReason:
            family.add_metric([reason], publisher.num_snapshots[reason])
        yield family
