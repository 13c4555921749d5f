"""Baton's own path: gathered out of one process's KV cache, put, verified, scattered into the other's, committed.

Timed from opening the transfer to the sender's knowing that the receiver has committed it; reservations are made
before, as a router does. One line of JSON a measurement, as cases.serve says.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

import grpc
import torch

from common.errors import BatonError
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import LAYOUT_NAME, KvLayout
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.transport.base import Transport
from kv_transfer.transport.sockets import SocketsSettings, SocketsTransport
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_worker import UcxSettings
from kv_transfer.types import (
    Handoff,
    KvFormat,
    OutgoingTransfer,
    ReceiverCallbacks,
    SenderCallbacks,
    TransferStats,
    TransferTarget,
    WorkerIdentity,
)
from loadtest.transfer.cases import Case, serve

WAIT_S: Final = 60.0
LEASE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Path:
    """How bytes go: "same-host" (the shared ring), "cma" (UCX puts), "tcp" (UCX over tcp), "sockets"."""

    name: str

    @property
    def requires(self) -> str:
        return {"same-host": "any", "cma": "any", "tcp": "tcp", "sockets": "tcp"}[self.name]

    @property
    def shares_ring(self) -> bool:
        return self.name == "same-host"

    def transport(self) -> Transport:
        if self.name == "sockets":
            return SocketsTransport(SocketsSettings())
        return UcxTransport(UcxSettings(net_devices="lo", tls="tcp" if self.name == "tcp" else ""))


def layout_of(case: Case) -> KvLayout:
    """One layer, one KV head, so that a block is block_bytes."""
    return KvLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=case.block_bytes // 64, dtype="bfloat16")


def kv_cache(case: Case) -> KvCache:
    cache = KvCache(layout_of(case), case.pool_blocks, torch.device("cpu"))
    cache.data.fill_(1.0)
    return cache


def kv_format(case: Case) -> KvFormat:
    return KvFormat("bench", LAYOUT_NAME, layout_of(case))


class Receiver:
    """The decode worker's end, in its own process, driven through a pipe."""

    def __init__(self, case: Case, path: Path, slots: int, slot_bytes: int) -> None:
        self.case = case
        self.cache = kv_cache(case)
        self.end = KvReceiver(
            self.cache,
            kv_format(case),
            WorkerIdentity("decode", "e"),
            transport=path.transport(),
            landing_slots=slots,
            landing_slot_bytes=slot_bytes,
            lease_s=LEASE_S,
            shares_ring=path.shares_ring,
        )

    def reserve(self, transfer_id: str, ids: Any) -> bytes:
        def on_fail(error: BatonError) -> None:
            sys.stderr.write(f"transfer {transfer_id} failed: {error.message}\n")

        callbacks = ReceiverCallbacks(lambda _handoff, _stats: None, on_fail)
        return self.end.reserve(transfer_id, list(map(int, ids)), 0, callbacks, WAIT_S)

    async def run(self, pipe: Connection) -> None:
        loop = asyncio.get_running_loop()
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        self.end.add_to_server(server)
        await self.end.start()
        await server.start()
        await loop.run_in_executor(None, pipe.send, f"127.0.0.1:{port}")
        while (request := await loop.run_in_executor(None, pipe.recv)) is not None:
            match request:
                case ("cpu",):
                    answer: Any = time.process_time()
                case reservations:
                    answer = [self.reserve(transfer_id, ids) for transfer_id, ids in reservations]
            await loop.run_in_executor(None, pipe.send, answer)


def receive(pipe: Connection, case: Case, path: Path, slots: int, slot_bytes: int) -> None:
    import uvloop

    torch.set_num_threads(1)
    uvloop.run(Receiver(case, path, slots, slot_bytes).run(pipe))


class Sender:
    """The prefill worker's end, in this process; its event loop has a thread of its own, as the engine would."""

    def __init__(self, case: Case, path: Path, slots: int, slot_bytes: int) -> None:
        import uvloop

        spawn = get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        spawn.Process(target=receive, args=(theirs, case, path, slots, slot_bytes), daemon=True).start()
        self.case = case
        self._end = KvSender(
            kv_cache(case),
            kv_format(case),
            WorkerIdentity("prefill", "e"),
            transport=path.transport(),
            staging_slots=slots,
            staging_slot_bytes=slot_bytes,
            lease_s=LEASE_S,
            require_transport=path.requires,
        )
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._end.start(), self._loop).result(WAIT_S)
        self._address = self._pipe.recv()

    def ask(self, request: Any) -> Any:
        self._pipe.send(request)
        return self._pipe.recv()

    def stats(self) -> Any:
        return self._end.stats()

    def reserve(self, names: list[str], ids: list[Any]) -> list[TransferTarget]:
        secrets = self.ask(list(zip(names, ids, strict=True)))
        return [TransferTarget(self._address, WorkerIdentity("decode", "e"), secret, 0) for secret in secrets]

    def start(self, name: str, target: TransferTarget, ids: list[int]) -> Sending:
        return Sending(self._end, name, target, ids)


class Sending:
    """One transfer, everything pushed at once. wait() returns seconds from its opening to its commit."""

    def __init__(self, end: KvSender, name: str, target: TransferTarget, ids: list[int]) -> None:
        self._done = threading.Event()
        self._result: TransferStats | BatonError | None = None
        self.started = time.perf_counter()
        self.ended = 0.0
        handle: OutgoingTransfer = end.open(
            name, target, len(ids), SenderCallbacks(lambda _n: None, self._on_end), WAIT_S
        )
        handle.push(ids)
        handle.commit(Handoff(1, 0))

    def _on_end(self, result: TransferStats | BatonError) -> None:
        self.ended = time.perf_counter()
        self._result = result
        self._done.set()

    def wait(self) -> float:
        if not self._done.wait(WAIT_S):
            raise TimeoutError("a transfer did not end")
        if isinstance(self._result, BatonError):
            raise self._result
        return self.ended - self.started


def main() -> None:
    case, path = Case.from_json(sys.argv[1]), Path(sys.argv[2])
    slots, slot_bytes = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    sender = Sender(case, path, slots, slot_bytes)

    def run(count: int) -> float:
        (target,) = sender.reserve([f"t{count}"], [case.ids(count, 2)])
        return sender.start(f"t{count}", target, case.ids(count, 1).tolist()).wait()

    serve(run)


if __name__ == "__main__":
    main()
