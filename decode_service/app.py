"""The decode worker as a process: model, scheduler and KV receiver around the common host."""

from __future__ import annotations

import asyncio
from typing import Final

from common.config import Settings
from common.engine.engine_thread import Inbox
from common.kvcache.block_pool import BlockPool
from common.kvcache.prefix_cache import PrefixCache
from common.worker.binding import TRANSFER_SERVICE, bind
from common.worker.host import OnReady, WorkerHost, WorkerParts, stop_on_signals
from common.worker.loading import LoadedModel, load
from decode_service.scheduler import DecodeScheduler
from kv_transfer.metrics import ReceiverCollector
from kv_transfer.receiver import KvReceiver
from kv_transfer.transport.select import make_transport
from kv_transfer.types import WorkerIdentity

# Prompt tokens that a step may compute beside the decodes, which wait for them: what one step costs the others.
CHUNK_BUDGET_TOKENS: Final = 256


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
    binding = await bind(settings, "decode", loaded)
    try:
        identity = WorkerIdentity(binding.info.worker_id, binding.info.epoch)
        receiver = _make_receiver(settings, loaded, identity)
        receiver.add_to_server(binding.server.server)
        await receiver.start()
        try:
            pool, inbox = BlockPool(loaded.kv_cache.num_blocks), Inbox()
            config = loaded.scheduler_config(settings, min(settings.prefill_budget_tokens, CHUNK_BUDGET_TOKENS))
            scheduler = DecodeScheduler(
                config, pool, PrefixCache(pool), receiver, binding.info.grpc_address, identity, inbox.put
            )
            parts = WorkerParts(
                scheduler=scheduler,
                runner=loaded.runner,
                inbox=inbox,
                services=(TRANSFER_SERVICE,),
                transfer_metrics=ReceiverCollector(receiver.stats),
                close_transfers=receiver.close,
            )
            await WorkerHost(binding, parts, check_when_idle=check_when_idle).serve(stop, on_ready)
        finally:
            await receiver.close()
    finally:
        await binding.close()


def _make_receiver(settings: Settings, loaded: LoadedModel, identity: WorkerIdentity) -> KvReceiver:
    return KvReceiver(
        loaded.kv_cache,
        loaded.fmt,
        identity,
        transport=make_transport(settings),
        landing_slots=settings.landing_slots,
        landing_slot_bytes=settings.landing_slot_bytes,
        lease_s=settings.transfer_lease_s,
        require_transport=settings.require_transport,
    )
