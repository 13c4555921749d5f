"""What the Prometheus pages of all services share: a registry a process, the process's own figures, and the buckets.

A process has one page with its own figures and nothing else: no files are shared, so no page needs merging, and what
a dead process counted never shows again. Who wants the sum of several routers or workers sums over `instance`.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

# Seconds, one scale for all: from a GPU's decode step (1 ms) to a CPU's long prompt (100 s). Dense where an SLO for
# inter-token latency may lie.
SECONDS_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
)  # fmt: skip
# A whole request may take up to its deadline, 600 s by default.
REQUEST_SECONDS_BUCKETS: Final = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 400.0, 600.0,
)  # fmt: skip
SEQUENCES_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
RATIO_BUCKETS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def new_registry() -> CollectorRegistry:
    """A registry with this process's memory, CPU time, file descriptors and start time (Linux; none elsewhere).

    Their names begin with baton_process_, so that they don't collide with an exporter's of the same host. The
    `_created` series, which double the page and which nobody reads, are switched off for the whole process.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(namespace="baton", registry=registry)
    return registry
