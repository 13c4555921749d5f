"""A worker's sockets and its identity: bound before anything is announced, so that every address is known."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from common.config import Settings
from common.metrics import new_registry
from common.registry import Role
from common.rpc.grpc_server import GrpcServer
from common.worker.info import WorkerInfo, new_epoch
from common.worker.loading import LoadedModel
from common.worker.metrics import MetricsServer

WORKER_SERVICE: Final = "baton.worker.v1.WorkerService"
TRANSFER_SERVICE: Final = "baton.transfer.v1.TransferService"
# Peers that ping each second, to notice a dead one soon, are welcome; and we ping them.
_GRPC_OPTIONS: Final = {
    "grpc.keepalive_time_ms": 5000,
    "grpc.keepalive_timeout_ms": 5000,
    "grpc.http2.ping_timeout_ms": 5000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.http2.max_ping_strikes": 0,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 500,
    "grpc.max_receive_message_length": 64 << 20,
}


PULL_SECRET_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Binding:
    """server: bound, not started. metrics_registry: what metrics_server serves already."""

    settings: Settings
    info: WorkerInfo
    server: GrpcServer
    metrics_registry: CollectorRegistry
    metrics_server: MetricsServer

    async def close(self) -> None:
        """Give the sockets back. Idempotent."""
        await self.server.stop(0.0)
        await asyncio.to_thread(self.metrics_server.close)


async def bind(settings: Settings, role: Role, loaded: LoadedModel) -> Binding:
    """Raises StartupError where a port can't be had."""
    server = GrpcServer(
        settings.host, settings.grpc_port, options=_GRPC_OPTIONS, remedy="stop the other server or set grpc_port"
    )
    registry = new_registry()
    try:
        metrics_server = MetricsServer(settings.host, settings.metrics_port, registry)
    except BaseException:
        await server.stop(0.0)
        raise
    layout = loaded.fmt.layout
    info = WorkerInfo(
        worker_id=settings.worker_id or f"{role}-{secrets.token_hex(4)}",
        epoch=new_epoch(),
        role=role,
        grpc_address=server.address(settings.dial_host),
        metrics_url=f"http://{settings.dial_host}:{metrics_server.port}/metrics",
        model_name=loaded.name,
        model_fingerprint=loaded.fmt.model_fingerprint,
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_blocks=loaded.kv_cache.num_blocks,
        max_model_len=loaded.max_model_len,
        has_host_tier=loaded.host_slots > 0,
        pull_secret=secrets.token_bytes(PULL_SECRET_BYTES),
    )
    return Binding(settings, info, server, registry, metrics_server)
