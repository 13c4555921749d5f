"""Copies of KV blocks out of and into a pool in CPU memory, checksum included, in one native pass. No torch here.

See native/block_copy.h. Calls release the GIL, so that a copy runs beside an event loop.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from common.kernels.cpu.build import NativeUnavailableError
from common.kernels.cpu.library import ffi, load_library

STRIPE_BYTES: Final = 64
# XXH3 has other forms for less.
MIN_BYTES: Final = 241


class BlockCopy:
    """run: bytes that lie together in the pool. Both calls return the XXH3-64 of the packed bytes.

    The caller answers for every run's lying inside memory that it may read (gather) or write (scatter).
    """

    def __init__(self, library: Any) -> None:
        self._lib = library

    @staticmethod
    def fits(num_runs: int, run_bytes: int) -> bool:
        """Whether both copies take runs of this size."""
        return run_bytes % STRIPE_BYTES == 0 and num_runs * run_bytes >= MIN_BYTES

    def gather(self, runs: npt.NDArray[np.uint64], run_bytes: int, packed: npt.NDArray[np.uint8]) -> int:
        """runs: uint64 [n], addresses, in packed order. packed: uint8 [n * run_bytes], written."""
        return self._call(self._lib.baton_gather, runs, run_bytes, packed)

    def scatter(self, packed: npt.NDArray[np.uint8], runs: npt.NDArray[np.uint64], run_bytes: int) -> int:
        """The other way. What is returned vouches for the bytes now in the pool, even where `packed` is changed by
        another process meanwhile: they were stored and hashed from the same load."""
        return self._call(self._lib.baton_scatter, runs, run_bytes, packed)

    def _call(self, function: Any, runs: npt.NDArray[np.uint64], run_bytes: int, packed: npt.NDArray[np.uint8]) -> int:
        if not self.fits(runs.size, run_bytes) or packed.nbytes != runs.size * run_bytes:
            raise ValueError(
                f"{runs.size} runs of {run_bytes} bytes and a buffer of {packed.nbytes} don't fit together"
            )
        addresses = np.ascontiguousarray(runs)
        pointer = ffi.cast("uint64_t *", addresses.ctypes.data)
        return int(function(pointer, runs.size, run_bytes, ffi.cast("uint8_t *", packed.ctypes.data)))


def load_block_copy() -> BlockCopy | None:
    """None where the native library can't be had: no compiler, or no such CPU."""
    try:
        return BlockCopy(load_library())
    except NativeUnavailableError:
        return None
