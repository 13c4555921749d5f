"""Doubles that the tests of KV transfer share: a KV store in numpy, a decode worker's transfer end in another process,
and a transport that spoils what it carries."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from common.errors import BatonError
from common.kvcache.checksum import checksum_of
from common.kvcache.layout import LAYOUT_NAME, KvLayout
from common.kvcache.reshape import BlockPart, Reshape, copy_parts
from kv_transfer.receiver import KvReceiver
from kv_transfer.stats import ReceiverStats
from kv_transfer.transport.base import Endpoint, LostHandler, PutDone, Region, Transport, TransportError
from kv_transfer.transport.sockets import SocketsSettings, SocketsTransport
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_worker import UcxSettings
from kv_transfer.types import Handoff, KvFormat, ReceiverCallbacks, TransferStats, TransferTarget, WorkerIdentity
from tests.netns import enter

SMALL = KvLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")  # 512 B a unit
WAIT_S = 20.0


class NumpyKvStore:
    """Implements KvStore: uint8 [num_layers, num_blocks, block_bytes]."""

    def __init__(self, layout: KvLayout, num_blocks: int, seed: int | None = None) -> None:
        self.layout = layout
        shape = (layout.num_layers, num_blocks, layout.block_bytes)
        self.data: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)
        if seed is not None:
            self.data[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)

    def gather(self, first_layer: int, num_layers: int, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> int:
        source = self.data[first_layer : first_layer + num_layers]
        np.take(source, block_ids, axis=1, out=out.reshape(num_layers, len(block_ids), -1), mode="clip")
        return checksum_of(out)

    def scatter(self, first_layer: int, num_layers: int, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> int:
        packed = data.reshape(num_layers, len(block_ids), -1)
        self.data[first_layer : first_layer + num_layers][:, list(block_ids)] = packed
        return checksum_of(data)

    def scatter_parts(
        self,
        first_layer: int,
        num_layers: int,
        block_ids: Sequence[int],
        data: npt.NDArray[np.uint8],
        parts: Sequence[BlockPart],
        reshape: Reshape,
    ) -> int:
        target, wire = self.by_token(first_layer, num_layers), reshape.wire
        shape = (num_layers, -1, 2, wire.num_kv_heads, wire.block_size, target.shape[-1])
        copy_parts(target, data.reshape(shape), parts, block_ids, reshape)
        return checksum_of(data)

    def by_token(self, first_layer: int = 0, num_layers: int | None = None) -> npt.NDArray[np.uint8]:
        """A view [layers, blocks, 2, heads, block_size, bytes of a head]."""
        layers = self.data[first_layer : None if num_layers is None else first_layer + num_layers]
        return layers.reshape(*layers.shape[:2], 2, self.layout.num_kv_heads, self.layout.block_size, -1)

    def blocks(self, block_ids: Sequence[int]) -> bytes:
        """Their bytes in all layers."""
        return self.data[:, list(block_ids)].tobytes()


def kv_format(layout: KvLayout = SMALL, fingerprint: str = "model-a") -> KvFormat:
    return KvFormat(fingerprint, LAYOUT_NAME, layout)


def num_threads_and_fds() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def transport_of(kind: str, devices: str = "lo", host: str = "127.0.0.1", advertise: str = "") -> Transport:
    """kind: "ucx", "ucx tcp" (no other lane), or "sockets"."""
    if kind == "sockets":
        return SocketsTransport(SocketsSettings(host, advertise))
    return UcxTransport(UcxSettings(net_devices=devices, tls=kind.removeprefix("ucx").strip()))


@dataclass
class SpoilingTransport:
    """Every put for which `spoils()` says so delivers one wrong byte."""

    inner: Transport
    spoils: Callable[[], bool]

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def devices(self) -> tuple[str, ...]:
        return self.inner.devices

    def start(self) -> None:
        self.inner.start()

    def allocate(self, num_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> Region:
        return self.inner.allocate(num_bytes, memory)

    def connect(self, descriptor: bytes, on_lost: LostHandler) -> Future[Endpoint]:
        outer: Future[Endpoint] = Future()

        def connected(inner: Future[Endpoint]) -> None:
            if error := inner.exception():
                outer.set_exception(error)
            else:
                outer.set_result(_SpoilingEndpoint(inner.result(), self.spoils))

        self.inner.connect(descriptor, on_lost).add_done_callback(connected)
        return outer

    def close(self) -> None:
        self.inner.close()


class _SpoilingEndpoint:
    def __init__(self, inner: Endpoint, spoils: Callable[[], bool]) -> None:
        self._inner, self._spoils = inner, spoils

    @property
    def lanes(self) -> tuple[str, ...]:
        return self._inner.lanes

    def put(
        self, source: Region, source_offset: int, target: int, num_bytes: int, timeout_s: float, done: PutDone
    ) -> None:
        if not self._spoils():
            self._inner.put(source, source_offset, target, num_bytes, timeout_s, done)
            return
        spot = source_offset + num_bytes // 2
        source.view[spot] ^= 0x40

        def restored(error: TransportError | None) -> None:
            source.view[spot] ^= 0x40
            done(error)

        self._inner.put(source, source_offset, target, num_bytes, timeout_s, restored)

    def close(self) -> Future[None]:
        return self._inner.close()


@dataclass(frozen=True)
class DecodeOptions:
    layout: KvLayout = SMALL
    num_blocks: int = 64
    fingerprint: str = "model-a"
    landing_slots: int = 8
    landing_slot_bytes: int = 4096
    lease_s: float = 2.0
    transport: str = "ucx"
    epoch: str = "epoch-1"
    # A namespace to live in; what it listens on and what others dial there.
    netns: str = ""
    devices: str = "lo"
    host: str = "127.0.0.1"
    advertise: str = "127.0.0.1"
    shares_ring: bool = False


@dataclass
class RemoteDecode:
    """A decode worker's transfer end in a process of its own, driven through a pipe."""

    process: Any
    pipe: Connection
    options: DecodeOptions
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, method: str, *args: Any) -> Any:
        with self.lock:
            self.pipe.send((method, args))
            if not self.pipe.poll(WAIT_S + 5.0):
                raise TimeoutError(f"no answer to {method}")
            result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def reserve(
        self, transfer_id: str, block_ids: Sequence[int], num_cached_tokens: int = 0, timeout_s: float = WAIT_S
    ) -> TransferTarget:
        secret = self.ask("reserve", transfer_id, list(block_ids), num_cached_tokens, timeout_s)
        return self.target(secret, num_cached_tokens)

    def target(self, secret: bytes, num_cached_tokens: int = 0, epoch: str = "") -> TransferTarget:
        worker = WorkerIdentity("decode-0", epoch or self.options.epoch)
        return TransferTarget(self.address, worker, secret, num_cached_tokens)

    def outcome(self, transfer_id: str) -> tuple[Any, ...]:
        """("committed", handoff, stats) or ("failed", kind, message); waits for it."""
        return tuple(self.ask("outcome", transfer_id))

    def stats(self) -> ReceiverStats:
        stats: ReceiverStats = self.ask("stats")
        return stats

    def stop(self) -> dict[str, Any]:
        """Closes in order; what is left over."""
        report: dict[str, Any] = self.ask("stop")
        self.process.join(WAIT_S)
        return report


@contextmanager
def remote_decode(options: DecodeOptions = DecodeOptions()) -> Iterator[RemoteDecode]:
    spawn = get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_decode_main, args=(theirs, options), daemon=True)
    process.start()
    theirs.close()
    remote = RemoteDecode(process, mine, options)
    try:
        remote.address = mine.recv()
        yield remote
    finally:
        if process.is_alive():
            process.kill()
        process.join(WAIT_S)
        process.close()
        mine.close()


def _decode_main(pipe: Connection, options: DecodeOptions) -> None:
    enter(options.netns)
    asyncio.run(_decode(pipe, options))


async def _decode(pipe: Connection, options: DecodeOptions) -> None:
    loop = asyncio.get_running_loop()
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{options.host}:0")
    before = num_threads_and_fds()
    end = _DecodeEnd(options)
    end.receiver.add_to_server(server)
    await end.receiver.start()
    await server.start()
    await loop.run_in_executor(None, pipe.send, f"{options.advertise}:{port}")
    while True:
        method, args = await loop.run_in_executor(None, pipe.recv)
        if method == "stop":
            await end.receiver.close()
            await server.stop(0)
            pipe.send({"before": before, "after": num_threads_and_fds(), "stats": end.receiver.stats()})
            return
        try:
            # As an engine would: not on the event loop.
            answer = await loop.run_in_executor(None, getattr(end, method), *args)
        except Exception as error:
            answer = error
        pipe.send(answer)


class _DecodeEnd:
    def __init__(self, options: DecodeOptions) -> None:
        self.store = NumpyKvStore(options.layout, options.num_blocks)
        self.receiver = KvReceiver(
            self.store,
            kv_format(options.layout, options.fingerprint),
            WorkerIdentity("decode-0", options.epoch),
            transport=transport_of(options.transport, options.devices, options.host, options.advertise),
            landing_slots=options.landing_slots,
            landing_slot_bytes=options.landing_slot_bytes,
            lease_s=options.lease_s,
            shares_ring=options.shares_ring,
        )
        self._changed = threading.Condition()
        self._outcomes: dict[str, list[tuple[Any, ...]]] = {}
        self._copies: dict[str, bytes] = {}

    def reserve(self, transfer_id: str, block_ids: list[int], num_cached_tokens: int, timeout_s: float) -> bytes:
        def note(*outcome: Any) -> None:
            with self._changed:
                self._outcomes.setdefault(transfer_id, []).append(outcome)
                self._changed.notify_all()

        def on_commit(handoff: Handoff, stats: TransferStats) -> None:
            note("committed", handoff, stats)

        def on_fail(error: BatonError) -> None:
            note("failed", error.kind, error.message)

        callbacks = ReceiverCallbacks(on_commit, on_fail)
        return self.receiver.reserve(transfer_id, block_ids, num_cached_tokens, callbacks, timeout_s)

    def release(self, transfer_id: str, block_ids: list[int]) -> None:
        """Release, and remember what the blocks hold from then on."""
        self.receiver.release(transfer_id)
        self._copies[transfer_id] = self.store.blocks(block_ids)

    def unchanged_since_release(self, transfer_id: str, block_ids: list[int]) -> bool:
        return self._copies[transfer_id] == self.store.blocks(block_ids)

    def outcome(self, transfer_id: str) -> tuple[Any, ...]:
        with self._changed:
            self._changed.wait_for(lambda: transfer_id in self._outcomes, WAIT_S)
            (only,) = self._outcomes.get(transfer_id, [("nothing",)])
            return only

    def num_outcomes(self, transfer_id: str) -> int:
        return len(self._outcomes.get(transfer_id, []))

    def blocks(self, block_ids: list[int]) -> bytes:
        return self.store.blocks(block_ids)

    def stats(self) -> ReceiverStats:
        return self.receiver.stats()
