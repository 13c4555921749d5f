"""Memory that UCX may read and write: allocated or given, registered, and described to peers."""

from __future__ import annotations

import mmap
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kv_transfer.transport import ucx_abi as abi
from kv_transfer.transport.ucx_worker import UcxWorker

HUGE_PAGE_BYTES: Final = 2 << 20


class UcxDescriptor(msgspec.Struct, frozen=True, array_like=True):
    worker_address: bytes
    base: int
    num_bytes: int
    remote_key: bytes


class UcxRegion:
    """Implements Region. worker_address: of the worker that peers connect to."""

    def __init__(self, worker_address: bytes, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> None:
        self._view = _huge_zeros(num_bytes) if memory is None else memory
        self._worker_address = worker_address
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
        return msgspec.msgpack.encode(
            UcxDescriptor(self._worker_address, self.address, self.num_bytes, self.remote_key)
        )

    # In the transport's thread.

    def register(self, thread: UcxWorker) -> None:
        """Raises TransportError (UNAVAILABLE)."""
        lib, ffi = thread.lib, abi.ffi
        params = ffi.new(
            "ucp_mem_map_params_t *",
            {
                "field_mask": abi.MEM_FIELD_ADDRESS | abi.MEM_FIELD_LENGTH,
                "address": ffi.cast("void *", self.address),
                "length": self.num_bytes,
            },
        )
        handle = ffi.new("ucp_mem_h *")
        what = f"registration of {self.num_bytes} bytes (with RDMA: raise the memlock limit)"
        abi.check(lib, lib.ucp_mem_map(thread.context, params, handle), what)
        self.memory_handle = handle[0]
        packed, size = ffi.new("void **"), ffi.new("size_t *")
        abi.check(lib, lib.ucp_rkey_pack(thread.context, handle[0], packed, size), "remote key")
        self.remote_key = abi.take_bytes(packed[0], size[0])
        lib.ucp_rkey_buffer_release(packed[0])

    def unregister(self, thread: UcxWorker) -> None:
        thread.lib.ucp_mem_unmap(thread.context, self.memory_handle)


def _huge_zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory on huge pages where the kernel grants them: a copy into another process pins its pages one by one, and
    with 4 KiB pages that costs several times the copying. Pages come as they are touched: staging that
    is never used, as on one host, takes no memory. The array keeps the mapping alive."""
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    everything: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE_BYTES
    return everything[start : start + num_bytes]
