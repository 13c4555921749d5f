"""The UCX transport: RDMA, shared memory or tcp, whatever UCX finds on both sides.

One context, worker and thread (ucx_worker.py); registered memory (ucx_memory.py); one-sided puts over endpoints with
error handling PEER (ucx_endpoint.py).
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from common.telemetry import get_logger
from kv_transfer.transport import ucx_abi as abi
from kv_transfer.transport.base import Endpoint, LostHandler, TransportError, TransportFault
from kv_transfer.transport.ucx_endpoint import UcxEndpoint, closed_error
from kv_transfer.transport.ucx_memory import UcxDescriptor, UcxRegion
from kv_transfer.transport.ucx_worker import UcxSettings, UcxWorker

_RESOURCE = re.compile(r"resource \d+\s.*-- ([\w/:.-]+)")

log = get_logger(__name__)


class UcxTransport:
    """Implements Transport. One context, worker and thread, whatever the number of endpoints."""

    name = "ucx"

    def __init__(self, settings: UcxSettings) -> None:
        self._worker_address = b""
        self.devices: tuple[str, ...] = ()
        self._thread = UcxWorker(settings, reap=self._reap, on_stop=self._on_stop)
        self._regions: list[UcxRegion] = []
        self._endpoints: dict[int, UcxEndpoint] = {}
        self._next_endpoint = 1
        # Kept for the transport's life: libucp may call it until the worker is destroyed.
        self._error_handler = abi.ffi.callback("ucp_err_handler_cb_t", self._on_error)

    def start(self) -> None:
        self._thread.start()
        self._worker_address = self._thread.call(self._get_address)
        self.devices = self._thread.call(self._get_devices)
        version = abi.c_string(self._thread.lib.ucp_get_version_string())
        devices = ", ".join(self.devices)
        log.info("UCX started", library=self._thread.library_path, version=version, devices=devices)

    def allocate(self, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> UcxRegion:
        region = UcxRegion(self._worker_address, num_bytes, memory)
        self._thread.call(lambda: self._register(region))
        return region

    def connect(self, descriptor: bytes, on_lost: LostHandler) -> Future[Endpoint]:
        future: Future[Endpoint] = Future()

        def connect() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._connect(descriptor, on_lost))
            except TransportError as error:
                future.set_exception(error)

        if not self.submit(connect):
            future.set_exception(closed_error())
        return future

    def close(self) -> None:
        self._thread.stop()

    def submit(self, command: Any) -> bool:
        return self._thread.submit(command)

    # The rest runs in the transport's thread.

    def _get_address(self) -> bytes:
        lib, ffi = self._thread.lib, abi.ffi
        pointer, size = ffi.new("void **"), ffi.new("size_t *")
        abi.check(lib, lib.ucp_worker_get_address(self._thread.worker, pointer, size), "worker address")
        address = abi.take_bytes(pointer[0], size[0])
        lib.ucp_worker_release_address(self._thread.worker, pointer[0])
        return address

    def _get_devices(self) -> tuple[str, ...]:
        report = abi.describe_context(self._thread.lib, self._thread.context)
        return tuple(dict.fromkeys(_RESOURCE.findall(report)))

    def _register(self, region: UcxRegion) -> None:
        region.register(self._thread)
        self._regions.append(region)

    def _connect(self, descriptor: bytes, on_lost: LostHandler) -> UcxEndpoint:
        try:
            target = msgspec.msgpack.decode(descriptor, type=UcxDescriptor)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            message = f"the peer's UCX descriptor ({len(descriptor)} bytes) is not one: {error}"
            raise TransportError(TransportFault.BAD_DESCRIPTOR, message) from None
        endpoint = UcxEndpoint(self._thread, target, on_lost)
        number, self._next_endpoint = self._next_endpoint, self._next_endpoint + 1
        self._endpoints[number] = endpoint
        try:
            endpoint.open(self._error_handler, number)
        finally:
            if not endpoint.is_open:
                del self._endpoints[number]
        return endpoint

    def _on_error(self, arg: Any, handle: Any, status: int) -> None:
        if (endpoint := self._endpoints.get(abi.address_of(arg))) is not None:
            endpoint.on_error(status)

    def _reap(self, now: float) -> float | None:
        deadlines = [endpoint.reap(now) for endpoint in list(self._endpoints.values())]
        for number in [number for number, endpoint in self._endpoints.items() if endpoint.closed]:
            del self._endpoints[number]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _on_stop(self) -> None:
        for endpoint in list(self._endpoints.values()):
            # Who closes the transport needs no news of its endpoints' loss.
            endpoint.begin_close(Future())
        while self._endpoints:
            self._thread.progress()
            self._reap(time.monotonic())
        for region in self._regions:
            region.unregister(self._thread)
        self._regions.clear()
