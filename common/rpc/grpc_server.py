"""A gRPC server that is bound before it serves, with health and reflection: the router's and the workers'.

Health of "" and of each service: NOT_SERVING until told otherwise, so that a port is known, and held, before it serves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import StartupError

# At DEBUG, gRPC logs the server that it is just freeing, where that never served: in whatever keeps the record (a
# test's capture, an error reporter) it is then freed a second time, which kills the process.
_FREES_WHAT_IT_LOGS: Final = "grpc._cython.cygrpc"
# With it a second server on the port would silently take half of the calls.
_NO_SHARED_PORT: Final = {"grpc.so_reuseport": 0}


class GrpcServer:
    """server: add services to it between construction and start."""

    def __init__(self, host: str, port: int, *, options: Mapping[str, Any], remedy: str) -> None:
        """Binds; serves nothing yet. Needs a running event loop. options: gRPC channel arguments.

        Raises StartupError where the port can't be had; `remedy` says in it what to do.
        """
        logging.getLogger(_FREES_WHAT_IT_LOGS).setLevel(logging.INFO)
        self.server = grpc.aio.server(options=tuple({**_NO_SHARED_PORT, **options}.items()))
        try:
            self.port = self.server.add_insecure_port(f"{bracketed(host)}:{port}")
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise StartupError(f"port {port} on {host} is in use: {remedy}")
        self._health = health.aio.HealthServicer()
        self._services: tuple[str, ...] = ("",)

    def address(self, dial_host: str) -> str:
        return f"{bracketed(dial_host)}:{self.port}"

    async def start(self, services: Sequence[str]) -> None:
        """Begin to serve, NOT_SERVING as far as health goes. services: full names, for health and reflection."""
        self._services = ("", *services)
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers, for the server as a whole and for each of its services."""
        status = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, cancel what is left after grace_s."""
        await self.server.stop(grace_s)


def bracketed(host: str) -> str:
    """As an address wants it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
