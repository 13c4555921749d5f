"""The prefill worker as a process: model, scheduler and KV sender around the common host."""

from __future__ import annotations

import asyncio

from common.config import Settings
from common.engine.engine_thread import Inbox
from common.kvcache.block_pool import BlockPool
from common.kvcache.prefix_cache import PrefixCache
from common.worker.binding import bind
from common.worker.host import OnReady, WorkerHost, WorkerParts, stop_on_signals
from common.worker.loading import LoadedModel, load
from kv_transfer.metrics import SenderCollector
from kv_transfer.sender import KvSender
from kv_transfer.transport.select import make_transport
from kv_transfer.types import WorkerIdentity
from prefill_service.scheduler import PrefillScheduler


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises StartupError, before anything listens, where it can't start."""
    loaded = load(settings)
    with stop_on_signals() as stop:
        await serve(settings, loaded, stop)


async def serve(
    settings: Settings,
    loaded: LoadedModel,
    stop: asyncio.Event,
    on_ready: OnReady | None = None,
    *,
    check_when_idle: bool = False,
) -> None:
    """Until `stop` is set. on_ready: called once requests would be served. check_when_idle: for tests."""
    binding = await bind(settings, "prefill", loaded)
    try:
        sender = _make_sender(settings, loaded, WorkerIdentity(binding.info.worker_id, binding.info.epoch))
        await sender.start()
        try:
            pool, inbox = BlockPool(loaded.kv_cache.num_blocks), Inbox()
            config = loaded.scheduler_config(settings, settings.prefill_budget_tokens)
            scheduler = PrefillScheduler(config, pool, PrefixCache(pool), sender, inbox.put)
            parts = WorkerParts(
                scheduler=scheduler,
                runner=loaded.runner,
                inbox=inbox,
                services=(),
                transfer_metrics=SenderCollector(sender.stats, settings.landing_slots),
                close_transfers=sender.close,
            )
            await WorkerHost(binding, parts, check_when_idle=check_when_idle).serve(stop, on_ready)
        finally:
            await sender.close()
    finally:
        await binding.close()


def _make_sender(settings: Settings, loaded: LoadedModel, identity: WorkerIdentity) -> KvSender:
    """Staging is as large as one landing ring: no more can be under way to a single peer."""
    return KvSender(
        loaded.kv_cache,
        loaded.fmt,
        identity,
        transport=make_transport(settings),
        staging_slots=settings.landing_slots,
        staging_slot_bytes=settings.landing_slot_bytes,
        lease_s=settings.transfer_lease_s,
        require_transport=settings.require_transport,
    )
