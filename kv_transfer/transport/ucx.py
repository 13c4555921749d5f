"""The UCX transport: RDMA, shared memory or tcp, whatever UCX finds on both sides.

One-sided puts over an endpoint with error handling PEER. A put counts as complete when the put and a flush after it
have both ended well and the endpoint's error handler has stayed silent: a flush alone may succeed after the peer died.
"""

from __future__ import annotations

import mmap
import re
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from common.telemetry import get_logger
from kv_transfer.transport import ucx_abi as abi
from kv_transfer.transport.base import Endpoint, LostHandler, PutDone, Region, TransportError, TransportFault
from kv_transfer.transport.ucx_worker import UcxSettings, UcxWorker

# A force-close waits for nobody: this only guards against a bug in UCX.
CLOSE_TIMEOUT_S: Final = 5.0
HUGE_PAGE_BYTES: Final = 2 << 20
_RESOURCE = re.compile(r"resource \d+\s.*-- ([\w/:.-]+)")
_LANE = re.compile(r"lane\[\d+\]:\s*\d+:([\w/:.-]+?)\.\d+\s")

log = get_logger(__name__)


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    worker_address: bytes
    base: int
    num_bytes: int
    remote_key: bytes


class UcxRegion:
    """Implements Region."""

    def __init__(self, transport: UcxTransport, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> None:
        self._view = _huge_zeros(num_bytes) if memory is None else memory
        self._transport = transport
        self.memory_handle: Any = None
        self.remote_key = b""

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self._view

    @property
    def address(self) -> int:
        return int(self._view.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return self._view.nbytes

    def descriptor(self) -> bytes:
        address = self._transport.worker_address
        return msgspec.msgpack.encode(_Descriptor(address, self.address, self.num_bytes, self.remote_key))


@dataclass(slots=True)
class _Put:
    """A posted put: its requests still under way, and what has gone wrong so far."""

    requests: list[Any]
    deadline: float
    done: PutDone
    error: TransportError | None = None


@dataclass(slots=True, eq=False)
class UcxEndpoint:
    """Implements Endpoint. Everything but put() and close() happens in the transport's thread."""

    transport: UcxTransport
    target: _Descriptor
    on_lost: LostHandler
    lanes: tuple[str, ...] = ()
    handle: Any = None
    remote_key: Any = None
    failure: TransportError | None = None
    puts: list[_Put] = field(default_factory=list)
    close_request: Any = None
    close_deadline: float | None = None
    close_waiters: list[Future[None]] = field(default_factory=list)
    closed: bool = False

    def put(
        self, source: Region, source_offset: int, target_offset: int, num_bytes: int, timeout_s: float, done: PutDone
    ) -> None:
        deadline = time.monotonic() + timeout_s

        def post() -> None:
            self.transport.post(self, source, source_offset, target_offset, num_bytes, deadline, done)

        if not self.transport.submit(post):
            done(_closed())

    def close(self) -> Future[None]:
        future: Future[None] = Future()

        def close() -> None:
            if self.closed:
                future.set_result(None)
                return
            self.close_waiters.append(future)
            self.transport.begin_close(self)

        if not self.transport.submit(close):
            future.set_result(None)
        return future

    def in_bounds(self, source: UcxRegion, source_offset: int, target_offset: int, num_bytes: int) -> bool:
        fits_source = 0 <= source_offset <= source_offset + num_bytes <= source.num_bytes
        return fits_source and 0 <= target_offset <= target_offset + num_bytes <= self.target.num_bytes


class UcxTransport:
    """Implements Transport. One context, worker and thread, whatever the number of endpoints."""

    name = "ucx"

    def __init__(self, settings: UcxSettings) -> None:
        self.worker_address = b""
        self.devices: tuple[str, ...] = ()
        self._thread = UcxWorker(settings, reap=self._reap, on_stop=self._on_stop)
        self._regions: list[UcxRegion] = []
        self._endpoints: dict[int, UcxEndpoint] = {}
        self._next_endpoint = 1
        self._no_params = abi.ffi.new("ucp_request_param_t *")
        # Kept for the transport's life: libucp may call it until the worker is destroyed.
        self._error_handler = abi.ffi.callback("ucp_err_handler_cb_t", self._on_error)

    def start(self) -> None:
        self._thread.start()
        self.worker_address = self._thread.call(self._get_address)
        self.devices = self._thread.call(self._get_devices)
        version = abi.c_string(self._thread.lib.ucp_get_version_string())
        devices = ", ".join(self.devices)
        log.info("UCX started", library=self._thread.library_path, version=version, devices=devices)

    def allocate(self, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> UcxRegion:
        region = UcxRegion(self, num_bytes, memory)
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
            future.set_exception(_closed())
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
        lib, ffi = self._thread.lib, abi.ffi
        params = ffi.new(
            "ucp_mem_map_params_t *",
            {
                "field_mask": abi.MEM_FIELD_ADDRESS | abi.MEM_FIELD_LENGTH,
                "address": ffi.cast("void *", region.address),
                "length": region.num_bytes,
            },
        )
        handle = ffi.new("ucp_mem_h *")
        what = f"registration of {region.num_bytes} bytes (with RDMA: raise the memlock limit)"
        abi.check(lib, lib.ucp_mem_map(self._thread.context, params, handle), what)
        region.memory_handle = handle[0]
        self._regions.append(region)
        packed, size = ffi.new("void **"), ffi.new("size_t *")
        abi.check(lib, lib.ucp_rkey_pack(self._thread.context, handle[0], packed, size), "remote key")
        region.remote_key = abi.take_bytes(packed[0], size[0])
        lib.ucp_rkey_buffer_release(packed[0])

    def _connect(self, descriptor: bytes, on_lost: LostHandler) -> UcxEndpoint:
        lib, ffi = self._thread.lib, abi.ffi
        try:
            target = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            message = f"the peer's UCX descriptor ({len(descriptor)} bytes) is not one: {error}"
            raise TransportError(TransportFault.BAD_DESCRIPTOR, message) from None
        endpoint = UcxEndpoint(self, target, on_lost)
        number, self._next_endpoint = self._next_endpoint, self._next_endpoint + 1
        address = ffi.from_buffer(target.worker_address)
        params = ffi.new(
            "ucp_ep_params_t *",
            {
                "field_mask": abi.EP_FIELD_REMOTE_ADDRESS | abi.EP_FIELD_ERR_HANDLING_MODE | abi.EP_FIELD_ERR_HANDLER,
                "address": address,
                "err_mode": abi.ERR_HANDLING_PEER,
                "err_handler": {"cb": self._error_handler, "arg": ffi.cast("void *", number)},
            },
        )
        handle = ffi.new("ucp_ep_h *")
        self._check_connect(lib.ucp_ep_create(self._thread.worker, params, handle))
        endpoint.handle = handle[0]
        self._endpoints[number] = endpoint
        key = ffi.new("ucp_rkey_h *")
        try:
            self._check_connect(lib.ucp_ep_rkey_unpack(endpoint.handle, ffi.from_buffer(target.remote_key), key))
        except TransportError:
            self.begin_close(endpoint)
            raise
        endpoint.remote_key = key[0]
        endpoint.lanes = parse_lanes(abi.describe_endpoint(lib, endpoint.handle))
        return endpoint

    def _check_connect(self, status: int) -> None:
        if status < abi.STATUS_OK:
            text = abi.status_text(self._thread.lib, status)
            message = f"UCX can't connect to the peer: {text}; are its devices (ucx_net_devices) reachable from here?"
            raise TransportError(TransportFault.BAD_DESCRIPTOR, message)

    def _on_error(self, arg: Any, handle: Any, status: int) -> None:
        endpoint = self._endpoints.get(abi.address_of(arg))
        if endpoint is not None and endpoint.failure is None:
            endpoint.failure = self._lost(status)

    def _lost(self, status: int) -> TransportError:
        text = abi.status_text(self._thread.lib, status)
        return TransportError(TransportFault.PEER_LOST, f"UCX lost the peer: {text}")

    def post(
        self,
        endpoint: UcxEndpoint,
        source: Region,
        source_offset: int,
        target_offset: int,
        num_bytes: int,
        deadline: float,
        done: PutDone,
    ) -> None:
        """Post a put and its flush. See Endpoint.put."""
        if endpoint.closed or endpoint.failure is not None or endpoint.close_deadline is not None:
            done(endpoint.failure or _closed())
            return
        if not isinstance(source, UcxRegion) or not endpoint.in_bounds(source, source_offset, target_offset, num_bytes):
            message = (
                f"put of {num_bytes} bytes from {source_offset} to {target_offset}: "
                f"the peer's region has {endpoint.target.num_bytes} bytes"
            )
            done(TransportError(TransportFault.OUT_OF_BOUNDS, message))
            return
        lib, ffi = self._thread.lib, abi.ffi
        params = ffi.new("ucp_request_param_t *", {"op_attr_mask": abi.OP_FIELD_MEMH, "memh": source.memory_handle})
        local = ffi.cast("void *", source.address + source_offset)
        put = _Put([], deadline, done)
        posted = lib.ucp_put_nbx(
            endpoint.handle, local, num_bytes, endpoint.target.base + target_offset, endpoint.remote_key, params
        )
        self._track(put, posted)
        if put.error is None:
            self._track(put, lib.ucp_ep_flush_nbx(endpoint.handle, self._no_params))
        endpoint.puts.append(put)

    def _track(self, put: _Put, posted: Any) -> None:
        status = abi.request_status(posted)
        if status is None:
            put.requests.append(posted)
        elif status < abi.STATUS_OK and put.error is None:
            put.error = self._lost(status)

    def begin_close(self, endpoint: UcxEndpoint) -> None:
        """Force-close; `_reap` sees to the end. A second call has no effect."""
        if endpoint.close_deadline is not None:
            return
        endpoint.close_deadline = time.monotonic() + CLOSE_TIMEOUT_S
        params = abi.ffi.new("ucp_request_param_t *", {"op_attr_mask": abi.OP_FIELD_FLAGS, "flags": abi.EP_CLOSE_FORCE})
        request = self._thread.lib.ucp_ep_close_nbx(endpoint.handle, params)
        endpoint.close_request = request if abi.request_status(request) is None else None

    def _reap(self, now: float) -> float | None:
        deadlines = [self._reap_endpoint(number, endpoint, now) for number, endpoint in list(self._endpoints.items())]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _reap_endpoint(self, number: int, endpoint: UcxEndpoint, now: float) -> float | None:
        """End what has ended; the endpoint's next deadline."""
        ended = [put for put in endpoint.puts if self._has_ended(put)]
        for put in ended:
            if endpoint.failure is None:
                endpoint.failure = put.error if endpoint.close_deadline is None else _closed()
        if endpoint.failure is None and any(put.deadline <= now for put in endpoint.puts if put not in ended):
            message = "a put was not complete in time: connection closed"
            endpoint.failure = TransportError(TransportFault.TIMEOUT, message)
        if endpoint.failure is not None:
            self.begin_close(endpoint)
        for put in ended:
            endpoint.puts.remove(put)
            put.done(put.error or endpoint.failure)
        if endpoint.close_deadline is None:
            return min((put.deadline for put in endpoint.puts), default=None)
        if self._is_pending(endpoint.close_request):
            if now < endpoint.close_deadline:
                return endpoint.close_deadline
            log.error("UCX did not close an endpoint in time")
        self._finish_close(number, endpoint)
        return None

    def _has_ended(self, put: _Put) -> bool:
        lib = self._thread.lib
        for request in list(put.requests):
            status = lib.ucp_request_check_status(request)
            if status == abi.STATUS_IN_PROGRESS:
                continue
            lib.ucp_request_free(request)
            put.requests.remove(request)
            if status < abi.STATUS_OK and put.error is None:
                put.error = self._lost(status)
        return not put.requests

    def _is_pending(self, request: Any) -> bool:
        return request is not None and self._thread.lib.ucp_request_check_status(request) == abi.STATUS_IN_PROGRESS

    def _finish_close(self, number: int, endpoint: UcxEndpoint) -> None:
        del self._endpoints[number]
        endpoint.closed = True
        unfinished = any(not self._has_ended(put) for put in endpoint.puts)
        for put in endpoint.puts:
            put.done(endpoint.failure or _closed())
        endpoint.puts.clear()
        if endpoint.close_request is not None and not self._is_pending(endpoint.close_request):
            self._thread.lib.ucp_request_free(endpoint.close_request)
        # A put that UCX still holds refers to the key: then the key is lost rather than used after it is freed.
        if endpoint.remote_key is not None and not unfinished:
            self._thread.lib.ucp_rkey_destroy(endpoint.remote_key)
        if endpoint.close_waiters:
            for waiter in endpoint.close_waiters:
                waiter.set_result(None)
        elif endpoint.failure is not None:
            endpoint.on_lost(endpoint.failure)

    def _on_stop(self) -> None:
        for endpoint in list(self._endpoints.values()):
            # Who closes the transport needs no news of its endpoints' loss.
            endpoint.close_waiters.append(Future())
            self.begin_close(endpoint)
        while self._endpoints:
            self._thread.progress()
            self._reap(time.monotonic())
        for region in self._regions:
            self._thread.lib.ucp_mem_unmap(self._thread.context, region.memory_handle)
        self._regions.clear()


def _huge_zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory on huge pages where the kernel grants them: a copy into another process pins its pages one by one, and
    with 4 KiB pages that costs several times the copying. The array keeps the mapping alive."""
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    everything: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE_BYTES
    view = everything[start : start + num_bytes]
    view.fill(0)
    return view


def parse_lanes(report: str) -> tuple[str, ...]:
    """Transport/device of each lane, in order, from ucp_ep_print_info's text."""
    return tuple(dict.fromkeys(_LANE.findall(report)))


def _closed() -> TransportError:
    return TransportError(TransportFault.CLOSED, "the UCX connection is closed")
