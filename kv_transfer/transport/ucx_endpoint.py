"""One UCX connection to a peer's ring: its puts, its failures, its end.

A put counts as complete when the put and a flush after it have both ended well and the endpoint's error handler has
stayed silent: a flush alone may succeed after the peer died.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from common.telemetry import get_logger
from kv_transfer.transport import ucx_abi as abi
from kv_transfer.transport.base import LostHandler, PutDone, Region, TransportError, TransportFault
from kv_transfer.transport.ucx_memory import UcxDescriptor, UcxRegion
from kv_transfer.transport.ucx_worker import UcxWorker

# A force-close waits for nobody: this only guards against a bug in UCX.
CLOSE_TIMEOUT_S: Final = 5.0
_LANE = re.compile(r"lane\[\d+\]:\s*\d+:([\w/:.-]+?)\.\d+\s")

log = get_logger(__name__)


@dataclass(slots=True)
class _Put:
    """A posted put: its requests still under way, and what has gone wrong so far."""

    requests: list[Any]
    deadline: float
    done: PutDone
    error: TransportError | None = None


class UcxEndpoint:
    """Implements Endpoint. Everything but put() and close() happens in the transport's thread: open, then reap after
    each progress until it is closed."""

    def __init__(self, thread: UcxWorker, target: UcxDescriptor, on_lost: LostHandler) -> None:
        self.lanes: tuple[str, ...] = ()
        self.closed = False
        self._thread = thread
        self._target = target
        self._on_lost = on_lost
        self._handle: Any = None
        self._remote_key: Any = None
        self._failure: TransportError | None = None
        self._puts: list[_Put] = []
        self._close_request: Any = None
        self._close_deadline: float | None = None
        self._close_waiters: list[Future[None]] = []

    def put(
        self, source: Region, source_offset: int, target_offset: int, num_bytes: int, timeout_s: float, done: PutDone
    ) -> None:
        deadline = time.monotonic() + timeout_s

        def post() -> None:
            self._post(source, source_offset, target_offset, num_bytes, deadline, done)

        if not self._thread.submit(post):
            done(closed_error())

    def close(self) -> Future[None]:
        future: Future[None] = Future()

        def close() -> None:
            if self.closed:
                future.set_result(None)
                return
            self._close_waiters.append(future)
            self.begin_close()

        if not self._thread.submit(close):
            future.set_result(None)
        return future

    # The rest runs in the transport's thread.

    def open(self, error_handler: Any, number: int) -> None:
        """number: what error_handler is given to find this endpoint by. Raises TransportError (BAD_DESCRIPTOR); if
        is_open then, it is closing, and still to be reaped."""
        lib, ffi = self._thread.lib, abi.ffi
        address = ffi.from_buffer(self._target.worker_address)
        params = ffi.new(
            "ucp_ep_params_t *",
            {
                "field_mask": abi.EP_FIELD_REMOTE_ADDRESS | abi.EP_FIELD_ERR_HANDLING_MODE | abi.EP_FIELD_ERR_HANDLER,
                "address": address,
                "err_mode": abi.ERR_HANDLING_PEER,
                "err_handler": {"cb": error_handler, "arg": ffi.cast("void *", number)},
            },
        )
        handle = ffi.new("ucp_ep_h *")
        self._check_connect(lib.ucp_ep_create(self._thread.worker, params, handle))
        self._handle = handle[0]
        key = ffi.new("ucp_rkey_h *")
        try:
            self._check_connect(lib.ucp_ep_rkey_unpack(self._handle, ffi.from_buffer(self._target.remote_key), key))
        except TransportError:
            self.begin_close()
            raise
        self._remote_key = key[0]
        self.lanes = parse_lanes(abi.describe_endpoint(lib, self._handle))

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def on_error(self, status: int) -> None:
        """UCX's error handler: the first word counts."""
        if self._failure is None:
            self._failure = self._lost(status)

    def _check_connect(self, status: int) -> None:
        if status < abi.STATUS_OK:
            text = abi.status_text(self._thread.lib, status)
            message = f"UCX can't connect to the peer: {text}; are its devices (ucx_net_devices) reachable from here?"
            raise TransportError(TransportFault.BAD_DESCRIPTOR, message)

    def _lost(self, status: int) -> TransportError:
        text = abi.status_text(self._thread.lib, status)
        return TransportError(TransportFault.PEER_LOST, f"UCX lost the peer: {text}")

    def _in_bounds(self, source: UcxRegion, source_offset: int, target_offset: int, num_bytes: int) -> bool:
        fits_source = 0 <= source_offset <= source_offset + num_bytes <= source.num_bytes
        return fits_source and 0 <= target_offset <= target_offset + num_bytes <= self._target.num_bytes

    def _post(
        self, source: Region, source_offset: int, target_offset: int, num_bytes: int, deadline: float, done: PutDone
    ) -> None:
        """Post a put and its flush. See Endpoint.put."""
        if self.closed or self._failure is not None or self._close_deadline is not None:
            done(self._failure or closed_error())
            return
        if not isinstance(source, UcxRegion) or not self._in_bounds(source, source_offset, target_offset, num_bytes):
            message = (
                f"put of {num_bytes} bytes from {source_offset} to {target_offset}: "
                f"the peer's region has {self._target.num_bytes} bytes"
            )
            done(TransportError(TransportFault.OUT_OF_BOUNDS, message))
            return
        lib, ffi = self._thread.lib, abi.ffi
        params = ffi.new("ucp_request_param_t *", {"op_attr_mask": abi.OP_FIELD_MEMH, "memh": source.memory_handle})
        local = ffi.cast("void *", source.address + source_offset)
        put = _Put([], deadline, done)
        posted = lib.ucp_put_nbx(
            self._handle, local, num_bytes, self._target.base + target_offset, self._remote_key, params
        )
        self._track(put, posted)
        if put.error is None:
            no_params = ffi.new("ucp_request_param_t *")
            self._track(put, lib.ucp_ep_flush_nbx(self._handle, no_params))
        self._puts.append(put)

    def _track(self, put: _Put, posted: Any) -> None:
        status = abi.request_status(posted)
        if status is None:
            put.requests.append(posted)
        elif status < abi.STATUS_OK and put.error is None:
            put.error = self._lost(status)

    def begin_close(self, waiter: Future[None] | None = None) -> None:
        """Force-close; `reap` sees to the end. A second call has no effect. waiter: who needs no news of a loss."""
        if waiter is not None:
            self._close_waiters.append(waiter)
        if self._close_deadline is not None:
            return
        self._close_deadline = time.monotonic() + CLOSE_TIMEOUT_S
        params = abi.ffi.new("ucp_request_param_t *", {"op_attr_mask": abi.OP_FIELD_FLAGS, "flags": abi.EP_CLOSE_FORCE})
        request = self._thread.lib.ucp_ep_close_nbx(self._handle, params)
        self._close_request = request if abi.request_status(request) is None else None

    def reap(self, now: float) -> float | None:
        """End what has ended; the endpoint's next deadline."""
        ended = [put for put in self._puts if self._has_ended(put)]
        for put in ended:
            if self._failure is None:
                self._failure = put.error if self._close_deadline is None else closed_error()
        if self._failure is None and any(put.deadline <= now for put in self._puts if put not in ended):
            message = "a put was not complete in time: connection closed"
            self._failure = TransportError(TransportFault.TIMEOUT, message)
        if self._failure is not None:
            self.begin_close()
        for put in ended:
            self._puts.remove(put)
            put.done(put.error or self._failure)
        if self._close_deadline is None:
            return min((put.deadline for put in self._puts), default=None)
        if self._is_pending(self._close_request):
            if now < self._close_deadline:
                return self._close_deadline
            log.error("UCX did not close an endpoint in time")
        self._finish_close()
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

    def _finish_close(self) -> None:
        self.closed = True
        unfinished = any(not self._has_ended(put) for put in self._puts)
        for put in self._puts:
            put.done(self._failure or closed_error())
        self._puts.clear()
        if self._close_request is not None and not self._is_pending(self._close_request):
            self._thread.lib.ucp_request_free(self._close_request)
        # A put that UCX still holds refers to the key: then the key is lost rather than used after it is freed.
        if self._remote_key is not None and not unfinished:
            self._thread.lib.ucp_rkey_destroy(self._remote_key)
        if self._close_waiters:
            for waiter in self._close_waiters:
                waiter.set_result(None)
        elif self._failure is not None:
            self._on_lost(self._failure)


def parse_lanes(report: str) -> tuple[str, ...]:
    """Transport/device of each lane, in order, from ucp_ep_print_info's text."""
    return tuple(dict.fromkeys(_LANE.findall(report)))


def closed_error() -> TransportError:
    return TransportError(TransportFault.CLOSED, "the UCX connection is closed")
