"""The native block copies: exactly the named runs move, and the checksum is XXH3-64 on every instruction set."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from common.kernels.cpu.block_copy import BlockCopy
from common.kernels.cpu.build import read_cpu_flags, supported_isas
from common.kernels.cpu.library import load_library

ISAS = supported_isas(read_cpu_flags())
pytestmark = pytest.mark.skipif(not ISAS, reason="no native kernels for this CPU")

Bytes = npt.NDArray[np.uint8]
shapes = st.tuples(st.sampled_from(ISAS), st.integers(1, 40), st.integers(1, 40), st.booleans())


def copy_for(isa: str) -> BlockCopy:
    return BlockCopy(load_library(next(known for known in ISAS if known == isa)))


def random_bytes(size: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def aligned(size: int, shift: int) -> Bytes:
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + shift
    return raw[start : start + size]


def runs_in(pool: Bytes, run_bytes: int, order: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return np.uint64(pool.ctypes.data) + order.astype(np.uint64) * np.uint64(run_bytes)


@given(shapes)
def test_gather_and_scatter_move_the_runs_and_return_their_xxh3(shape: tuple[str, int, int, bool]) -> None:
    isa, num_runs, stripes, odd = shape
    run_bytes, copy = 64 * stripes, copy_for(isa)
    if not copy.fits(num_runs, run_bytes):
        return
    order = np.random.default_rng(num_runs).permutation(num_runs + 3)[:num_runs]
    pool = aligned((num_runs + 3) * run_bytes, 8 if odd else 0)
    pool[:] = random_bytes(pool.size)
    packed = np.zeros(num_runs * run_bytes, np.uint8)
    checksum = copy.gather(runs_in(pool, run_bytes, order), run_bytes, packed)
    assert np.array_equal(packed, pool.reshape(-1, run_bytes)[order].ravel())
    assert checksum == xxhash.xxh3_64_intdigest(packed.data)

    other, expected = aligned(pool.size, 8 if odd else 0), np.zeros(pool.size, np.uint8)
    expected.reshape(-1, run_bytes)[order] = packed.reshape(-1, run_bytes)
    assert copy.scatter(packed, runs_in(other, run_bytes, order), run_bytes) == checksum
    assert np.array_equal(other, expected)


def test_a_scatter_s_checksum_is_of_what_it_stored_though_the_source_changes_meanwhile() -> None:
    copy = copy_for(ISAS[0])
    packed, pool = random_bytes(1 << 20), np.zeros(1 << 20, np.uint8)
    runs, stop = runs_in(pool, pool.size, np.zeros(1, np.int64)), threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            packed[:] = packed[::-1]

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(50):
            assert copy.scatter(packed, runs, pool.size) == xxhash.xxh3_64_intdigest(pool.data)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("num_runs", "run_bytes", "packed"), [(4, 60, 240), (3, 64, 192), (4, 64, 255), (0, 64, 0)])
def test_sizes_that_do_not_fit_are_refused(num_runs: int, run_bytes: int, packed: int) -> None:
    pool = np.zeros(1024, np.uint8)
    runs = runs_in(pool, run_bytes, np.arange(num_runs))
    with pytest.raises(ValueError, match="don't fit together"):
        copy_for(ISAS[0]).gather(runs, run_bytes, np.zeros(packed, np.uint8))
