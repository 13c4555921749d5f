"""The router process: builds the parts, runs until a signal, and takes them down in order.

registry ─► fleet ─► placer ─► dispatcher ─► gateway: HTTP, gRPC
              ▲                    │
prefix index ─┴────────────────────┘      metrics look at fleet and dispatcher; observers hear of every request's end

SIGTERM   unready, no new work ─ shutdown_grace_s ─► streams that still run end with an error frame ─► exit
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redis.asyncio import Redis

from common import heap, sd_notify
from common.config import Settings
from common.errors import BatonError, ErrorKind, StartupError
from common.redis_client import RedisTimeouts, connect
from common.rpc.grpc_server import GrpcServer
from common.tasks import end_task
from common.telemetry import get_logger
from common.tracing import SpanSink, TraceSampler, open_sink
from router.admission import Admission, Capacity
from router.cluster.fleet import Fleet
from router.cluster.index_audit import IndexAudit
from router.cluster.prefix_index import PrefixIndex
from router.cluster.registry import ModelIdentity, RegistryWatcher
from router.cluster_metrics import ClusterCollector
from router.dispatcher import Dispatcher
from router.gateway.grpc_api import InferenceServicer
from router.gateway.http import build_app
from router.gateway.state import GatewayState, ServedModel
from router.metrics import RouterMetrics
from router.observers import Observers
from router.placement_feedback import PlacementFeedback
from router.placer import Placer
from router.policy.admission import Targets
from router.policy.transfer_rate import TransferRate
from router.request import RequestRun
from router.request_trace import RequestTracer
from router.served_model import load_served_model
from router.servers import INFERENCE_SERVICE, HttpServer, bind_grpc
from router.tenancy.directory import TenantDirectory
from router.tenancy.quota import Quotas
from router.tenancy.served_sync import ServedSync
from router.tenancy.store import FileTenantStore, RedisTenantStore, TenantStore
from router.timeline import Timeline

# For answers that were failed at the end of the grace period to reach their clients.
LAST_WORDS_S: Final = 1.0
REDIS_CONNECT_S: Final = 1.0
ENCODER_THREADS: Final = 2
# How long a thread that works on a long prompt may make the event loop wait for the interpreter; Python's own: 5 ms.
GIL_SWITCH_S: Final = 0.0005
HEALTH_REFRESH_S: Final = 1.0
# For the last spans: what is left of the grace, within these bounds. A collector that answers needs neither.
MIN_TRACE_FLUSH_S: Final = 0.2
MAX_TRACE_FLUSH_S: Final = 1.0

_log = get_logger(__name__)


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError (one line) where it can't start; returns on a clean stop."""
    sys.setswitchinterval(GIL_SWITCH_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with serve(settings) as router, alive():
            _log.info("router is listening", http=router.http_url, grpc=router.grpc_address, model=router.model.name)
            heap.settle()
            await stop.wait()
            _log.info("router is stopping", in_flight=router.dispatcher.num_in_flight)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def alive() -> AsyncIterator[None]:
    """Tells the supervisor that this process lives, as long as the context is open."""
    pats = asyncio.create_task(sd_notify.keep_alive(), name="watchdog")
    try:
        yield
    finally:
        await end_task(pats)


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """What a caller of `serve` may look at."""

    http_url: str
    grpc_address: str
    model: ServedModel
    fleet: Fleet
    dispatcher: Dispatcher


@asynccontextmanager
async def serve(settings: Settings) -> AsyncIterator[RunningRouter]:
    """A router that listens while the context is open; leaving it is the clean stop. Raises StartupError."""
    model = await asyncio.to_thread(load_served_model, settings)
    transfer_prefix = secrets.token_hex(6)
    async with AsyncExitStack() as stack:
        redis = _redis(settings)
        stack.push_async_callback(redis.aclose)
        executor = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="encode")
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        sink = await asyncio.to_thread(open_sink, settings, "router", f"router-{transfer_prefix}")
        if sink is not None:
            stack.callback(sink.close, 0.0)  # where the start fails; else it is closed by then
        metrics, timeline = RouterMetrics(), Timeline(settings.timeline_entries)
        tracer = None if sink is None else RequestTracer(sink, model.name, settings.dial_host, settings.port)
        fleet = Fleet(f"router-{transfer_prefix}", time.monotonic, settings.worker_silence_s)
        stack.push_async_callback(fleet.close)
        audit, transfers = IndexAudit(redis, settings.cluster, fleet), TransferRate()
        stack.push_async_callback(end_task, asyncio.create_task(audit.run(), name="index audit"))
        observers = Observers(metrics, timeline, tracer, PlacementFeedback(transfers, audit))
        index = PrefixIndex(redis, settings.cluster, time.monotonic)
        placer = Placer(
            fleet,
            index,
            settings.block_size,
            settings.local_prefill_max_tokens,
            transfers,
            time.monotonic,
            shared_cores=settings.shared_cores,
        )
        tenants = TenantDirectory(_tenant_store(settings, redis))
        await tenants.load()
        quotas = Quotas(redis, settings.cluster, transfer_prefix, time.monotonic)
        stack.push_async_callback(quotas.close)
        admission = Admission[RequestRun](
            Targets(settings.target_ttft_ms / 1000, settings.target_itl_ms / 1000),
            settings.max_waiting,
            lambda: _capacity(fleet),
            lambda: metrics.token_gaps,
            time.monotonic,
        )
        dispatcher = Dispatcher(placer, observers, admission, transfer_prefix, time.monotonic, quotas)
        sampler = TraceSampler(exporting=sink is not None, sample_ratio=settings.trace_sample_ratio)
        state = GatewayState(
            settings=settings,
            model=model,
            dispatcher=dispatcher,
            fleet=fleet,
            metrics=metrics,
            observers=observers,
            timeline=timeline,
            sampler=sampler,
            executor=executor,
            clock=time.monotonic,
            tenants=tenants,
            quotas=quotas,
        )
        identity = ModelIdentity(model.fingerprint, settings.block_size)
        watcher = RegistryWatcher(redis, settings.cluster, identity, fleet.apply_records)
        metrics.watch(ClusterCollector(fleet, dispatcher, watcher, index, audit, time.monotonic))

        stop_within_s, shared = settings.shutdown_grace_s + LAST_WORDS_S, settings.reuse_port
        http = HttpServer(build_app(state), settings.host, settings.port, stop_within_s, reuse_port=shared)
        stack.callback(http.close)
        servicer = InferenceServicer(state)
        grpc_server = bind_grpc(servicer, settings.host, settings.grpc_port, reuse_port=shared)
        await grpc_server.start((INFERENCE_SERVICE,))
        http.start()
        served = ServedSync(redis, settings.cluster, admission)
        background = (
            ("registry", watcher.run()), ("tenants", tenants.run()), ("quotas", quotas.run()), ("served", served.run())
        )  # fmt: skip
        for name, work in background:
            stack.push_async_callback(end_task, asyncio.create_task(work, name=name))
        stack.push_async_callback(_drain, dispatcher, http, grpc_server, servicer, sink, settings.shutdown_grace_s)
        health = asyncio.create_task(_follow_readiness(state, grpc_server), name="health")
        stack.push_async_callback(end_task, health)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield RunningRouter(f"http://{host}:{http.port}", f"{host}:{grpc_server.port}", model, fleet, dispatcher)


async def _drain(
    dispatcher: Dispatcher,
    http: HttpServer,
    grpc_server: GrpcServer,
    servicer: InferenceServicer,
    sink: SpanSink | None,
    grace_s: float,
) -> None:
    """Requests that run may finish within grace_s; those that don't, fail with DRAINING. Spans go in what is left."""
    grace_ends = time.monotonic() + grace_s
    error = BatonError(ErrorKind.DRAINING, "the router is shutting down; try again elsewhere", retry_after_s=1.0)
    dispatcher.refuse_new(error)
    await grpc_server.set_serving(False)
    http.stop_accepting()
    servicer.drain()
    grpc_stopped = asyncio.create_task(grpc_server.stop(grace_s + LAST_WORDS_S))
    await dispatcher.wait_empty(grace_s)
    dispatcher.fail_all(error)
    await http.wait_stopped()
    await grpc_stopped
    if sink is not None:
        flush_s = min(MAX_TRACE_FLUSH_S, max(MIN_TRACE_FLUSH_S, grace_ends - time.monotonic()))
        await asyncio.to_thread(sink.close, flush_s)


async def _follow_readiness(state: GatewayState, grpc_server: GrpcServer) -> None:
    """grpc.health.v1 says what /ready says."""
    shown = False
    while True:
        if state.ready != shown:
            shown = state.ready
            await grpc_server.set_serving(shown)
            _log.info("router is ready" if shown else "router is not ready")
        await state.fleet.wait_changed(HEALTH_REFRESH_S)


def _tenant_store(settings: Settings, redis: Redis) -> TenantStore | None:
    if settings.auth == "anonymous":
        return None
    if settings.tenants_file:
        return FileTenantStore(Path(settings.tenants_file))
    return RedisTenantStore(redis, settings.cluster)


def _capacity(fleet: Fleet) -> Capacity:
    decodes = [session.record for session in fleet.usable("decode")]
    kv_tokens = sum(record.num_blocks * record.block_size for record in decodes)
    return Capacity(len(fleet.usable("prefill")), len(decodes), kv_tokens)


def _redis(settings: Settings) -> Redis:
    """Lazy: nothing is dialled yet. Raises StartupError."""
    url = settings.redis_url.get_secret_value()
    if not url:
        raise StartupError("the router needs the Redis that its workers use: pass --redis-url redis://HOST:6379")
    return connect(url, RedisTimeouts(connect_s=REDIS_CONNECT_S))
