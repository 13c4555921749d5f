"""The limit: the same blocks copied in this process by memcpy (numpy.take), by as many threads as told."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from loadtest.transfer.cases import Case, serve


def main() -> None:
    case, num_threads = Case.from_json(sys.argv[1]), int(sys.argv[2])
    shape = (case.pool_blocks, case.block_bytes)
    source, target = np.ones(shape, np.uint8), np.ones(shape, np.uint8)
    cuts = [len(part) for part in np.array_split(np.arange(case.num_blocks), num_threads)]
    bounds = np.concatenate([[0], np.cumsum(cuts)])
    pool = ThreadPoolExecutor(num_threads)
    chosen = [case.ids(run, 1) for run in range(case.pool_blocks // case.num_blocks)]

    def copy(ids: np.ndarray, first: int, begin: int, end: int) -> None:
        if end > begin:
            np.take(source, ids[begin:end], axis=0, out=target[first + begin : first + end], mode="clip")

    def run(count: int) -> float:
        which = count % len(chosen)
        start = time.perf_counter()
        parts = [
            pool.submit(copy, chosen[which], which * case.num_blocks, int(bounds[i]), int(bounds[i + 1]))
            for i in range(num_threads)
        ]
        for part in parts:
            part.result()
        return time.perf_counter() - start

    serve(run)


if __name__ == "__main__":
    main()
