"""Raw sockets: the same blocks sent by sendall over loopback TCP, received by recv_into straight into the other
process's blocks; the end is told by one byte. No gathering, no checksum, no protocol."""

from __future__ import annotations

import socket
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from loadtest.transfer.cases import Case, serve

BUFFER_BYTES = 4 << 20


def receive(pipe: Connection, text: str) -> None:
    case = Case.from_json(text)
    target = np.ones((case.pool_blocks, case.block_bytes), np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        count = 0
        while True:
            for block in case.ids(count, 2):
                view, left = memoryview(target[block]), case.block_bytes
                while left:
                    got = connection.recv_into(view[-left:], left)
                    if not got:
                        return
                    left -= got
            connection.sendall(b"\1")
            count += 1


def main() -> None:
    case = Case.from_json(sys.argv[1])
    spawn = get_context("spawn")
    mine, theirs = spawn.Pipe()
    spawn.Process(target=receive, args=(theirs, sys.argv[1]), daemon=True).start()
    source = np.ones((case.pool_blocks, case.block_bytes), np.uint8)
    with socket.create_connection(mine.recv()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

        def run(count: int) -> float:
            ids = case.ids(count, 1)
            start = time.perf_counter()
            for block in ids:
                connection.sendall(source[block])
            connection.recv(1)
            return time.perf_counter() - start

        serve(run)


if __name__ == "__main__":
    main()
