"""The router's metrics that others own (fleet, dispatcher, registry watcher, prefix index), read when somebody asks.

So a worker's labels are gone when the worker is, and no gauge can drift from the truth.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.registry import Role
from router.cluster.fleet import Fleet
from router.cluster.index_audit import IndexAudit
from router.cluster.prefix_index import PrefixIndex
from router.cluster.registry import RegistryWatcher
from router.cluster.worker_session import SessionEvent, SessionState, WorkerSession
from router.dispatcher import Dispatcher

PRIORITY_CLASSES: Final = ("urgent", "default", "background")
_ROLES: Final[tuple[Role, ...]] = get_args(Role)
# As docs/METRICS.md has them; a session that is closed is no member of the fleet any more.
_WORKER_STATES: Final = (str(SessionState.DIALLING), str(SessionState.READY), str(SessionState.SILENT), "draining")


class ClusterCollector(Collector):
    """For the event loop's thread, as all that it reads. clock: monotonic seconds, the watcher's."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        watcher: RegistryWatcher,
        index: PrefixIndex,
        audit: IndexAudit,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._watcher = watcher
        self._index = index
        self._audit = audit
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        running, waiting = self._dispatcher.num_running, self._dispatcher.num_waiting
        yield GaugeMetricFamily("baton_requests_running", "Requests that a worker computes", value=running)
        # Outside scripts read these two by their plain names: they stay without labels.
        yield GaugeMetricFamily("baton_requests_waiting", "Requests that no worker computes yet", value=waiting)
        text = "Requests in the router's queue, by class: below, at or above priority 0"
        family = GaugeMetricFamily("baton_queue_requests", text, labels=["priority_class"])
        queued = Tally[str]()
        for priority, number in self._dispatcher.admission.queue.num_by_class().items():
            queued[PRIORITY_CLASSES[(priority > 0) - (priority < 0) + 1]] += number
        for name in PRIORITY_CLASSES:
            family.add_metric([name], queued[name])
        yield family
        windows = self._dispatcher.admission.windows
        text = "Prompt tokens that a prefill worker may have before it, by measured TTFT"
        yield GaugeMetricFamily("baton_admission_prefill_tokens", text, windows.prefill_tokens)
        text = "Requests that a decode worker may run, by measured inter-token latency"
        yield GaugeMetricFamily("baton_admission_running", text, windows.running)
        yield self._workers()
        yield self._session_events()
        yield self._kv_usage()
        late = self._fleet.num_late_frames
        yield CounterMetricFamily("baton_late_frames", "Workers' frames for transfers that were over", late)
        yield from self._freshness()

    def _workers(self) -> Metric:
        family = GaugeMetricFamily("baton_workers", "Known workers", labels=["role", "state"])
        tally = Tally((s.record.role, _worker_state(s)) for s in self._fleet.sessions())
        for role in _ROLES:
            for state in _WORKER_STATES:
                family.add_metric([role, state], tally[role, state])
        return family

    def _session_events(self) -> Metric:
        text = "Sessions with workers that came up (connected) or broke (lost)"
        family = CounterMetricFamily("baton_worker_session_events", text, labels=["role", "event"])
        tally: Mapping[tuple[Role, SessionEvent], int] = self._fleet.session_events
        for role in _ROLES:
            for event in SessionEvent:
                family.add_metric([role, event], tally.get((role, event), 0))
        return family

    def _kv_usage(self) -> Metric:
        text = "Share of a worker's KV blocks that requests hold, as it last reported"
        family = GaugeMetricFamily("baton_kv_cache_usage_ratio", text, labels=["worker_id", "role"])
        for session in self._fleet.sessions():
            report = session.report
            if report is not None and report.num_blocks:
                used = 1.0 - report.num_free_blocks / report.num_blocks
                family.add_metric([session.record.worker_id, session.record.role], used)
        return family

    def _freshness(self) -> Iterator[Metric]:
        age_s = self._clock() - self._watcher.polled_at
        text = "Age of the last successful look at the registry of workers"
        yield GaugeMetricFamily("baton_registry_age_seconds", text, age_s)
        text = "Looks at the registry of workers that failed"
        yield CounterMetricFamily("baton_registry_poll_failures", text, self._watcher.num_failures)
        text = "Prompts looked up in the prefix index; skipped: not asked, right after a failure"
        family = CounterMetricFamily("baton_prefix_index_lookups", text, labels=["outcome"])
        index = self._index
        counts = (("answered", index.num_answered), ("failed", index.num_failed), ("skipped", index.num_skipped))
        for outcome, number in counts:
            family.add_metric([outcome], number)
        yield family
        text = "How wrong the prefix index was about a worker, in its last placements"
        errors = GaugeMetricFamily("baton_prefix_index_error_ratio", text, labels=["worker_id"])
        for session in self._fleet.sessions():
            worker_id = session.record.worker_id
            errors.add_metric([worker_id], self._audit.error_ratio(worker_id))
        yield errors
        text = "Workers asked to write their index entries anew, which were wrong"
        yield CounterMetricFamily("baton_prefix_index_rereads", text, self._audit.num_rereads)


def _worker_state(session: WorkerSession) -> str:
    return "draining" if session.ready and session.record.draining else str(session.state)
