"""NIXL (PyPI nixl-cu12 works on CPU memory): WRITE of the same blocks from pool to pool, both registered; prepared
descriptor lists. Only the transfer itself is timed, from transfer() to its state DONE. Runs in NIXL's own venv."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from loadtest.transfer.cases import Case, serve


def open_agent(name: str, case: Case) -> tuple[Any, Any, list[tuple[int, int, int]]]:
    """The agent, its pool (kept alive by the caller), and a descriptor for each block."""
    package = "nixl_cu12" if sys.argv[-1] == "cu12" else "nixl"
    api = import_module(f"{package}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    pool = np.ones(case.pool_blocks * case.block_bytes, np.uint8)
    base = pool.ctypes.data
    agent.register_memory(agent.get_reg_descs([(base, pool.nbytes, 0, "")], "DRAM"))
    return agent, pool, [(base + i * case.block_bytes, case.block_bytes, 0) for i in range(case.pool_blocks)]


def receive(pipe: Connection, argv: list[str]) -> None:
    sys.argv = argv
    agent, pool, blocks = open_agent("target", Case.from_json(argv[1]))
    pipe.send((agent.get_agent_metadata(), blocks))
    pipe.recv()
    del pool


def main() -> None:
    case = Case.from_json(sys.argv[1])
    spawn = get_context("spawn")
    mine, theirs = spawn.Pipe()
    spawn.Process(target=receive, args=(theirs, sys.argv), daemon=True).start()
    agent, _pool, blocks = open_agent("source", case)
    metadata, remote_blocks = mine.recv()
    peer = agent.add_remote_agent(metadata)
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", blocks, "DRAM")
    remote = agent.prep_xfer_dlist(peer, remote_blocks, "DRAM")

    def run(count: int) -> float:
        handle = agent.make_prepped_xfer("WRITE", local, case.ids(count, 1), remote, case.ids(count, 2))
        start = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer ended as {state}")
        agent.release_xfer_handle(handle)
        return seconds

    serve(run)


if __name__ == "__main__":
    main()
