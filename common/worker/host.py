"""A worker's life around its engine, the same for both phases: come up, serve, drain, go.

    up     engine ► gRPC ► registry ► health SERVING ► "ready"
    down   health NOT_SERVING, reports and registry "draining", engine refuses ► what runs ends, or the grace does: it
           is handed back to its routers ► KV that others still fetch is sent ► engine aborts the rest ► transfers close
           ► sessions end ► keys leave the registry ► sockets close

SIGTERM and the Drain call begin it alike. Each stage of the way down has a bound, and one that fails does not keep the
next from running.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from prometheus_client.registry import Collector

from baton.worker.v1 import worker_pb2_grpc
from common import sd_notify
from common.engine.cost_rates import CostRates
from common.engine.engine_thread import EngineThread, Inbox, Scheduler
from common.engine.messages import DrainCommand, EngineNews, HandBackCommand
from common.engine.runner import Runner
from common.engine.splitting_runner import SplittingRunner
from common.errors import StartupError
from common.step_rates import StepRateEstimator
from common.telemetry import get_logger
from common.tracing import open_sink
from common.worker.binding import WORKER_SERVICE, Binding
from common.worker.heartbeat import Heartbeat
from common.worker.info import WorkerInfo
from common.worker.leg_reports import LegReporter
from common.worker.liveness import LivenessLimits
from common.worker.memory_guard import MemoryLimits, watch_memory
from common.worker.metrics import WorkerMetrics
from common.worker.publisher_metrics import PublisherCollector
from common.worker.registry_publisher import RegistryPublisher, connect
from common.worker.session import SessionHub

WATCH_INTERVAL_S: Final = 0.25
ABORT_TIMEOUT_S: Final = 2.0
# For KV that other workers still fetch when the grace is over. A transfer whose peer is gone ends with its lease.
LINGER_S: Final = 10.0
GRPC_GRACE_S: Final = 0.2
STAGE_TIMEOUT_S: Final = 10.0
# For the last spans to reach a collector that answers.
TRACE_FLUSH_S: Final = 0.3
# For the supervisor: not a matter of settings, so a new start may help.
ENGINE_FAILURE_EXIT: Final = 1

_log = get_logger(__name__)
OnReady = Callable[[WorkerInfo], None]


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a phase brings. services: full gRPC names besides the worker's own, added to the server already.
    close_transfers: called once, after the engine has stopped; idempotent. measured_rates: what steps take, until
    enough have run. model_failure: why the model can't compute any more, as one line; asked a few times a second."""

    scheduler: Scheduler
    runner: Runner
    inbox: Inbox
    services: tuple[str, ...]
    transfer_metrics: Sequence[Collector]
    close_transfers: Callable[[], Awaitable[None]]
    measured_rates: CostRates
    model_failure: Callable[[], str | None]


class WorkerHost:
    """Owns engine thread, sessions and publisher, and takes `binding` over. For one event loop; `serve` once."""

    def __init__(self, binding: Binding, parts: WorkerParts) -> None:
        """Raises StartupError for a redis_url that can't be read."""
        settings, info = binding.settings, binding.info
        self._binding = binding
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._drain_asked = asyncio.Event()
        self._grace_s = settings.shutdown_grace_s
        self._step_rates = StepRateEstimator()
        self._redis = connect(settings.redis_url.get_secret_value())
        self._publisher = RegistryPublisher(self._redis, settings.cluster, info, settings.index_max_blocks)
        self._metrics = WorkerMetrics(binding.metrics_registry, info, parts.transfer_metrics)
        binding.metrics_registry.register(PublisherCollector(self._publisher))
        self._hub = SessionHub(info, parts.inbox, settings.request_timeout_s, self._ask_to_drain)
        self._traces = open_sink(settings, info.role, info.worker_id)
        self._leg_reporter = LegReporter(info.role, info.worker_id, self._traces)
        self._engine = EngineThread(
            parts.scheduler,
            SplittingRunner(parts.runner, info.block_size),
            parts.inbox,
            self._relay_news,
            name=f"{info.role}-engine",
            check_when_idle=settings.check_when_idle,
            canary_interval_s=settings.canary_interval_s,
        )
        self._heartbeat = Heartbeat(
            self._engine,
            self._hub,
            binding.server,
            LivenessLimits(settings.engine_stall_s, settings.engine_exit_s),
            lambda: self._step_rates.rates,
            parts.measured_rates,
        )

    async def serve(self, stop: asyncio.Event, on_ready: OnReady | None = None) -> None:
        """Until `stop` is set or Drain called, or the engine fails: StartupError with exit code 1 then. Leaves nothing
        behind."""
        limits = MemoryLimits(self._binding.settings.memory_close_ratio)
        tasks = [
            asyncio.create_task(self._heartbeat.run(), name="heartbeat"),
            asyncio.create_task(watch_memory(limits, self._parts.inbox.put), name="memory"),
        ]
        failure: str | None = None
        try:
            await self._come_up()
            if on_ready is not None:
                on_ready(self._binding.info)
            failure = await self._watch(stop)
        finally:
            await self._go_down(failure)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failure is not None:
            raise StartupError(f"worker {self._binding.info.worker_id} ends: {failure}", exit_code=ENGINE_FAILURE_EXIT)

    async def _come_up(self) -> None:
        info, server = self._binding.info, self._binding.server
        self._engine.start()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._hub, server.server)
        await server.start((WORKER_SERVICE, *self._parts.services))
        await self._heartbeat.set_serving(True)
        await self._publisher.start()
        sd_notify.notify("READY=1")
        _log.info(
            "ready",
            address=info.grpc_address,
            metrics=info.metrics_url,
            epoch=info.epoch,
            kv_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
        )

    async def _watch(self, stop: asyncio.Event) -> str | None:
        """Returns why the engine is unwell, or None when asked to stop."""
        while not (stop.is_set() or self._drain_asked.is_set()):
            if (failure := self._engine_failure()) is not None:
                _log.error("engine unwell", reason=failure)
                return failure
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await stop.wait()
        return None

    def _ask_to_drain(self, grace_s: float | None) -> float:
        if grace_s is not None:
            self._grace_s = min(grace_s, self._binding.settings.request_timeout_s)
        self._drain_asked.set()
        return WATCH_INTERVAL_S + self._grace_s + LINGER_S + ABORT_TIMEOUT_S + STAGE_TIMEOUT_S

    def _engine_failure(self) -> str | None:
        if (model_failure := self._parts.model_failure()) is not None:
            return model_failure
        if self._engine.failure is not None:
            return self._engine.failure
        if not self._engine.is_alive:
            return "the engine's thread has ended"
        if self._heartbeat.lost.is_set():
            return f"the engine's loop has not moved for {self._binding.settings.engine_exit_s:g} s (engine_exit_s)"
        return None

    async def _go_down(self, failure: str | None) -> None:
        _log.info("stopping")
        sd_notify.notify("STOPPING=1")
        self._publisher.drain()
        self._hub.drain()
        self._idle.clear()
        self._parts.inbox.put(DrainCommand())
        await self._stage("health", self._heartbeat.set_serving(False))
        if failure is None:
            await self._drain()
        await self._stage("engine", asyncio.to_thread(self._engine.stop, ABORT_TIMEOUT_S))
        await self._stage("transfers", self._parts.close_transfers())
        await self._stage("sessions", self._hub.close())
        await self._stage("registry", self._publisher.close())
        await self._stage("redis", self._redis.aclose())
        await self._stage("grpc", self._binding.server.stop(GRPC_GRACE_S))
        await self._stage("metrics", asyncio.to_thread(self._binding.metrics_server.close))
        if self._traces is not None:
            await self._stage("traces", asyncio.to_thread(self._traces.close, TRACE_FLUSH_S))
        _log.info("stopped")

    async def _drain(self) -> None:
        """Let what runs come to its end, for as long as the grace lasts; then hand it back, and let others have the KV
        that they still fetch. The commands themselves bring news."""
        if not await self._is_idle_within(self._grace_s):
            self._parts.inbox.put(HandBackCommand())
            await self._is_idle_within(LINGER_S)

    async def _is_idle_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return self._idle.is_set()

    async def _stage(self, name: str, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(STAGE_TIMEOUT_S):
                await work
        except Exception:
            _log.exception("shutdown stage failed", stage=name)

    def _relay_news(self, news: EngineNews) -> None:
        """From the engine's thread to the loop; a loop that is closed needs no news."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_news, news)

    def _on_news(self, news: EngineNews) -> None:
        if news.step_s is not None and news.step_shape is not None:
            self._step_rates.add(news.step_s, news.step_shape.num_prefill_tokens, news.step_shape.num_decode_tokens)
        news = replace(news, load=replace(news.load, step_rates=self._step_rates.rates))
        if self._engine.num_open == 0:
            self._idle.set()
        self._hub.on_news(news)
        self._metrics.on_news(news)
        if news.cache_changes is not None:
            self._publisher.on_changes(news.cache_changes)
        if news.ended_legs:
            self._leg_reporter.on_ended(news.ended_legs)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets, instead of ending the process."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
