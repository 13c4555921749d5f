"""Memory that another process of the same host can map: a landing ring into which a sender writes without any put.

    receiver: SharedMemory ── descriptor, in Welcome ──► sender: open_shared ──► the same bytes, or None

A memfd: no name in any file system, given back by the kernel when both processes are gone, however they end. The peer
reaches it as /proc/<pid>/fd/<fd>, which the kernel allows only to who may read this process's memory anyway (the same
user, or root). Its random name, compared after opening, says whether it is the right one: on another host, or in
another PID namespace, it is not, and bytes go by the transport instead. Sealed, so that no mapping can lose its bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    pid: int
    fd: int
    name: str
    num_bytes: int


class SharedMemory:
    """Zeroed; pages come as they are touched: slots used last are used first, so a quiet ring takes few.

    view: uint8 [num_bytes]; lives as long as something refers to it. Raises OSError."""

    def __init__(self, num_bytes: int) -> None:
        self._name = f"baton-ring-{secrets.token_hex(16)}"
        self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, num_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self.view: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self._fd, num_bytes), np.uint8)
        except BaseException:
            os.close(self._fd)
            raise

    def descriptor(self) -> bytes:
        return msgspec.msgpack.encode(_Descriptor(os.getpid(), self._fd, self._name, self.view.nbytes))

    def close(self) -> None:
        """No further process can map it. Views and mappings stay valid. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_shared(descriptor: bytes) -> npt.NDArray[np.uint8] | None:
    """The memory, writable; None where it can't be reached from here, or is not what the descriptor says."""
    try:
        wanted = msgspec.msgpack.decode(descriptor, type=_Descriptor)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    path, link = f"/proc/{wanted.pid}/fd/{wanted.fd}", f"/memfd:{wanted.name} (deleted)"
    try:
        if os.readlink(path) != link:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        whole = os.fstat(fd).st_size == wanted.num_bytes and fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS
        if not whole or os.readlink(f"/proc/self/fd/{fd}") != link:
            return None
        return np.frombuffer(mmap.mmap(fd, wanted.num_bytes), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
