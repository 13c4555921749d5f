"""The two listening servers, HTTP and gRPC: bind, serve, stop within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from common.errors import StartupError
from common.rpc.grpc_server import GrpcServer
from router.gateway.grpc_api import InferenceServicer
from router.http_protocol import BoundedHttpProtocol

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 75
TICK_S: Final = 1.0
GRPC_OPTIONS: Final = {
    "grpc.max_receive_message_length": 16 << 20,
    # Clients that ping a silent stream are not attackers.
    "grpc.http2.min_ping_interval_without_data_ms": 5000,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.http2.ping_timeout_ms": 10_000,
}
INFERENCE_SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.exit_asked = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, see router/app.py."""
        yield

    async def main_loop(self) -> None:
        """As uvicorn's, but woken by the stop instead of looking for it ten times a second."""
        while not await self.on_tick(0):  # 0: it renews the Date header at each tick
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self.exit_asked.wait()
                self.should_exit = True


class HttpServer:
    """Bound on construction, so that a port in use is told before anything else starts. Raises StartupError."""

    def __init__(self, app: ASGIApp, host: str, port: int, stop_within_s: float, *, reuse_port: bool = False) -> None:
        self._socket = _bind(host, port, "--port", reuse_port=reuse_port)
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(stop_within_s),
        )
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http server")

    def stop_accepting(self) -> None:
        """New connections are refused; what runs goes on, each connection closing with its answer."""
        self._server.exit_asked.set()

    async def wait_stopped(self) -> None:
        """After stop_accepting, and at most stop_within_s."""
        if self._task is not None:
            await self._task
        self.close()

    def close(self) -> None:
        """Give the port back; for a server that was never started."""
        self._socket.close()


def bind_grpc(servicer: InferenceServicer, host: str, port: int, *, reuse_port: bool = False) -> GrpcServer:
    """The public gRPC API, bound and not started; start it for INFERENCE_SERVICE. Raises StartupError."""
    options = {**GRPC_OPTIONS, "grpc.so_reuseport": int(reuse_port)}
    server = GrpcServer(host, port, options=options, remedy="stop the other server or pass --grpc-port")
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.server)
    return server


def _bind(host: str, port: int, option: str, *, reuse_port: bool) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port)
    except socket.gaierror:
        raise StartupError(f"can't listen on {host!r}: it is no address of this machine; pass another --host") from None
    except PermissionError:
        raise StartupError(f"port {port} on {host} needs privileges: pass {option} with a number above 1023") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(_in_use(host, port, option)) from None
        raise StartupError(f"can't listen on {host}:{port}: {error.strerror}; pass another --host") from None
    bound.setblocking(False)
    return bound


def _in_use(host: str, port: int, option: str) -> str:
    return f"port {port} on {host} is in use: stop the other server or pass {option}"
