"""Baton's transport alone, as NIXL is measured: the same blocks gathered out of the KV cache (checksum taken) and put
into the other process's landing ring. Nobody verifies or scatters them; transfers between workers do (baton_peer.py).
"""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

from kv_transfer.transport.base import Endpoint, TransportError
from kv_transfer.transport.shared_memory import SharedMemory, open_shared
from loadtest.transfer.baton_peer import Path, kv_cache
from loadtest.transfer.cases import Case, serve

RING_BYTES = 64 << 20
WAIT_S = 60.0
# Fewer than slots, so that none is gathered into while it is still being put.
MAX_UNDER_WAY = 4


def receive(pipe: Connection, path: Path) -> None:
    memory = SharedMemory(RING_BYTES)
    transport = path.transport()
    transport.start()
    ring = transport.allocate(RING_BYTES, memory.view)
    pipe.send((ring.descriptor(), memory.descriptor()))
    pipe.recv()


class Writer:
    """memory: where pieces are gathered; put() then carries one over. Where the ring itself is mapped here, it is there
    already."""

    def __init__(self, path: Path, ring: bytes, shared: bytes) -> None:
        self._free = threading.Semaphore(MAX_UNDER_WAY)
        self._error: TransportError | None = None
        window = open_shared(shared) if path.shares_ring else None
        self._endpoint: Endpoint | None = None
        if window is not None:
            self.memory = window
            return
        transport = path.transport()
        transport.start()
        self._staging = transport.allocate(RING_BYTES)
        self.memory = self._staging.view
        self._endpoint = transport.connect(ring, self._ended).result(WAIT_S)

    def put(self, offset: int, size: int) -> None:
        if self._endpoint is not None:
            self._free.acquire()
            self._endpoint.put(self._staging, offset, offset, size, WAIT_S, self._ended)

    def drain(self) -> None:
        """Until all puts are complete. Raises TransportError."""
        for _ in range(MAX_UNDER_WAY):
            self._free.acquire()
        self._free.release(MAX_UNDER_WAY)
        if self._error is not None:
            raise self._error

    def _ended(self, error: TransportError | None) -> None:
        self._error = self._error or error
        self._free.release()


def main() -> None:
    case, path = Case.from_json(sys.argv[1]), Path(sys.argv[2])
    slot_bytes = max(int(sys.argv[4]), case.block_bytes)
    spawn = get_context("spawn")
    mine, theirs = spawn.Pipe()
    spawn.Process(target=receive, args=(theirs, path), daemon=True).start()
    cache = kv_cache(case)
    writer = Writer(path, *mine.recv())
    per_piece, slots = slot_bytes // case.block_bytes, RING_BYTES // slot_bytes

    def run(count: int) -> float:
        ids = case.ids(count, 1).tolist()
        start = time.perf_counter()
        for number, first in enumerate(range(0, len(ids), per_piece)):
            piece = ids[first : first + per_piece]
            offset, size = number % slots * slot_bytes, len(piece) * case.block_bytes
            cache.gather(0, 1, piece, writer.memory[offset : offset + size])
            writer.put(offset, size)
        writer.drain()
        return time.perf_counter() - start

    serve(run)


if __name__ == "__main__":
    main()
