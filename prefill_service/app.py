"""The prefill worker as a process: model, scheduler and KV sender around the common host."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from common import heap
from common.config import Settings
from common.engine.engine_thread import Inbox
from common.kvcache.block_pool import BlockPool
from common.rpc.worker_messages import WorkerIdentity
from common.transfer_cost import CostEstimator
from common.worker.binding import TRANSFER_SERVICE, Binding, bind
from common.worker.host import OnReady, WorkerHost, WorkerParts, stop_on_signals
from common.worker.lending import make_lender
from common.worker.loading import LoadedModel, load
from kv_transfer.build import make_receiver, make_sender
from kv_transfer.lender import Lender
from kv_transfer.metrics import PullCollector, SenderCollector
from kv_transfer.puller import Puller
from kv_transfer.receiver import KvReceiver
from prefill_service.pulls import Pulls
from prefill_service.scheduler import PrefillScheduler


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
    binding = await bind(settings, "prefill", loaded)
    try:
        info = binding.info
        identity = WorkerIdentity(info.worker_id, info.epoch)
        async with AsyncExitStack() as stack:
            sender = make_sender(settings, loaded.kv_cache, loaded.fmt, identity, settings.landing_slots)
            await sender.start()
            stack.push_async_callback(sender.close)
            pool, inbox = BlockPool(loaded.kv_cache.num_blocks), Inbox()
            config = loaded.scheduler_config(settings, settings.prefill_budget_tokens, settings.prefill_step_target_ms)
            pulling = None
            if settings.pull_prefixes == "auto":
                pulling = await _Pulling.start(settings, loaded, binding, identity, inbox)
                stack.push_async_callback(pulling.close)
            pulls = pulling.pulls if pulling else None
            scheduler = PrefillScheduler(config, pool, loaded.prefix_cache(pool), sender, inbox.put, pulls)
            scheduler.lend_by(sender, inbox.put)
            parts = WorkerParts(
                scheduler=scheduler,
                runner=loaded.runner,
                inbox=inbox,
                services=(TRANSFER_SERVICE,) if pulling else (),
                transfer_metrics=(
                    SenderCollector(sender.stats, settings.landing_slots),
                    *([PullCollector(pulling.puller.stats, pulling.lender)] if pulling else []),
                ),
                close_transfers=stack.aclose,
                measured_rates=loaded.rates,
                model_failure=loaded.model_failure,
            )
            await WorkerHost(binding, parts).serve(stop, on_ready)
    finally:
        await binding.close()


@dataclass(frozen=True, slots=True)
class _Pulling:
    """What a prefill worker needs besides, to fetch prefixes from others and to lend its own."""

    receiver: KvReceiver
    puller: Puller
    lender: Lender
    pulls: Pulls

    @classmethod
    async def start(
        cls, settings: Settings, loaded: LoadedModel, binding: Binding, identity: WorkerIdentity, inbox: Inbox
    ) -> _Pulling:
        """Adds TransferService to the worker's server. Raises StartupError."""
        layout, info = loaded.fmt.layout, binding.info
        receiver = make_receiver(settings, loaded.kv_cache, loaded.fmt, identity, settings.pull_slots)
        lender = make_lender(info, inbox)
        receiver.add_to_server(binding.server.server, lender)
        await receiver.start()
        puller = Puller(receiver, info.grpc_address, identity, layout.block_size)
        puller.start()
        pulls = Pulls(puller, CostEstimator(), layout.block_size, layout.token_bytes, inbox.put)
        return cls(receiver, puller, lender, pulls)

    async def close(self) -> None:
        await self.puller.close()
        await self.receiver.close()
