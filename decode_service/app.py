"""The decode worker as a process: model, scheduler and KV receiver around the common host."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from common import heap
from common.config import Settings
from common.engine.engine_thread import Inbox
from common.kvcache.block_pool import BlockPool
from common.rpc.worker_messages import WorkerIdentity
from common.worker.binding import TRANSFER_SERVICE, bind
from common.worker.host import OnReady, WorkerHost, WorkerParts, stop_on_signals
from common.worker.lending import make_lender
from common.worker.loading import LoadedModel, load
from decode_service.scheduler import DecodeScheduler
from kv_transfer.build import make_receiver, make_sender
from kv_transfer.metrics import PullCollector, ReceiverCollector

# Prompt tokens that a step may compute beside the decodes, which wait for them: itl_target_ms says how many of these.
MAX_CHUNK_TOKENS: Final = 1024


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT. Raises StartupError, before anything listens, where it can't start."""
    loaded = load(settings)
    heap.settle()
    with loaded, stop_on_signals() as stop:
        await serve(settings, loaded, stop)


async def serve(
    settings: Settings,
    loaded: LoadedModel,
    stop: asyncio.Event,
    on_ready: OnReady | None = None,
) -> None:
    """Until `stop` is set. on_ready: called once requests would be served."""
    binding = await bind(settings, "decode", loaded)
    try:
        info = binding.info
        identity = WorkerIdentity(info.worker_id, info.epoch)
        lends = settings.pull_prefixes == "auto"
        pool, inbox = BlockPool(loaded.kv_cache.num_blocks), Inbox()
        lender = make_lender(info, inbox) if lends else None
        async with AsyncExitStack() as stack:
            receiver = make_receiver(settings, loaded.kv_cache, loaded.fmt, identity, settings.landing_slots)
            receiver.add_to_server(binding.server.server, lender)
            await receiver.start()
            stack.push_async_callback(receiver.close)
            config = loaded.scheduler_config(
                settings, min(settings.prefill_budget_tokens, MAX_CHUNK_TOKENS), settings.itl_target_ms
            )
            secret = info.pull_secret if lends else b""
            scheduler = DecodeScheduler(
                config, pool, loaded.prefix_cache(pool), receiver, info.grpc_address, identity, inbox.put, secret
            )
            if lends:
                sender = make_sender(settings, loaded.kv_cache, loaded.fmt, identity, settings.pull_slots)
                await sender.start()
                stack.push_async_callback(sender.close)
                scheduler.lend_by(sender, inbox.put)
            parts = WorkerParts(
                scheduler=scheduler,
                runner=loaded.runner,
                inbox=inbox,
                services=(TRANSFER_SERVICE,),
                transfer_metrics=(
                    ReceiverCollector(receiver.stats),
                    *([PullCollector(None, lender)] if lender else []),
                ),
                close_transfers=stack.aclose,
                measured_rates=loaded.rates,
                model_failure=loaded.model_failure,
            )
            await WorkerHost(binding, parts).serve(stop, on_ready)
    finally:
        await binding.close()
