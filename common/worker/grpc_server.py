"""A worker's gRPC server: bound before it serves, with health and reflection.

Health of "" and of each service: NOT_SERVING until ready, while draining, and when the engine is unwell.
"""

from __future__ import annotations

from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import StartupError

WORKER_SERVICE: Final = "baton.worker.v1.WorkerService"
TRANSFER_SERVICE: Final = "baton.transfer.v1.TransferService"
# Peers that ping each second, to notice a dead one soon, are welcome; and we ping them.
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.max_receive_message_length", 64 << 20),
)


class GrpcServer:
    """server: add services to it between construction and start."""

    def __init__(self, host: str, port: int) -> None:
        """Binds, so that the port is known; serves nothing yet. Raises StartupError. Needs a running event loop."""
        self.server = grpc.aio.server(options=_OPTIONS)
        try:
            self.port = self.server.add_insecure_port(f"{_bracketed(host)}:{port}")
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise StartupError(f"can't listen on {host}:{port}: the port is in use, or not ours: set grpc_port")
        self._health = health.aio.HealthServicer()
        self._services: tuple[str, ...] = ("",)

    def address(self, dial_host: str) -> str:
        return f"{_bracketed(dial_host)}:{self.port}"

    async def start(self, services: tuple[str, ...]) -> None:
        """Begin to serve, NOT_SERVING as far as health goes. services: full names, for health and reflection."""
        self._services = ("", *services)
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, cancel what is left after grace_s."""
        await self.server.stop(grace_s)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
