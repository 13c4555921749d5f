"""Frames over a Unix socket on one host: whole, in order, and only from who holds the channel's token."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvloop

from kv_transfer.control_line import (
    MAX_MESSAGE_BYTES,
    MAX_STRANGERS,
    MAX_WAITING_BYTES,
    ControlLine,
    ControlListener,
    connect_line,
)
from kv_transfer.frames import SenderFrame
from tests.integration.test_kv_transfer import Outbound, away, sending
from tests.kv_fakes import SMALL, DecodeOptions, NumpyKvStore, remote_decode

WAIT_S = 10.0


def encode(frames: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(frames)


def refuse(_message: bytes) -> None:
    raise AssertionError("nobody may send here")


class Inbox:
    """The receiver's side of one channel."""

    def __init__(self, listener: ControlListener[bytes]) -> None:
        self.line: ControlLine[bytes] | None = None
        self.attached = asyncio.Event()
        self.got: asyncio.Queue[bytes] = asyncio.Queue()
        self.offer, self.token = listener.offer(self.attach)

    def attach(self, line: ControlLine[bytes]) -> Callable[[bytes], None]:
        self.line = line
        self.attached.set()
        return self.take

    def take(self, message: bytes) -> None:
        for frame in msgspec.msgpack.decode(message, type=list[bytes]):
            self.got.put_nowait(frame)

    async def next(self) -> bytes:
        return await asyncio.wait_for(self.got.get(), WAIT_S)


@asynccontextmanager
async def listening(patience_s: float = WAIT_S) -> AsyncIterator[ControlListener[bytes]]:
    listener: ControlListener[bytes] = ControlListener(encode, patience_s)
    await listener.start()
    try:
        yield listener
    finally:
        listener.close()


def stranger(inbox: Inbox) -> socket.socket:
    name, _ = msgspec.msgpack.decode(inbox.offer)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{name}".encode())
    sock.settimeout(WAIT_S)
    return sock


def is_cut(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True
    finally:
        sock.close()


def frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


async def check_order() -> None:
    async with listening() as listener:
        inbox = Inbox(listener)
        line = await connect_line(inbox.offer, encode, refuse)
        assert line is not None
        sent = [bytes([i % 256]) * (i % 2000) for i in range(3000)]
        for one in sent:
            assert line.put(one)
        line.close()
        assert [await inbox.next() for _ in sent] == sent
        assert inbox.line is not None
        await asyncio.wait_for(inbox.line.lost, WAIT_S)
        await asyncio.wait_for(line.lost, WAIT_S)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_frames_arrive_whole_and_in_order_and_closing_loses_none(run: Callable[..., None]) -> None:
    run(check_order())


@pytest.mark.parametrize(
    "said",
    [frame(b"0" * 16), frame(b""), b"\xff" * 64, struct.pack("<I", MAX_MESSAGE_BYTES + 1)],
    ids=["wrong token", "empty", "garbage", "too long"],
)
async def test_who_has_not_the_token_is_cut_and_takes_nobody_s_place(said: bytes) -> None:
    async with listening() as listener:
        inbox = Inbox(listener)
        sock = stranger(inbox)
        sock.sendall(said)
        assert await away(is_cut, sock)
        assert inbox.line is None
        line = await connect_line(inbox.offer, encode, refuse)
        assert line is not None
        line.put(b"me")
        assert await inbox.next() == b"me"
        line.abort()


async def test_who_says_nothing_is_cut_after_a_while() -> None:
    async with listening(patience_s=0.05) as listener:
        assert await away(is_cut, stranger(Inbox(listener)))


async def test_strangers_are_bounded() -> None:
    async with listening() as listener:
        inbox = Inbox(listener)
        socks = [stranger(inbox) for _ in range(MAX_STRANGERS + 1)]
        assert await away(is_cut, socks.pop())
        for sock in socks:
            sock.close()


async def test_a_token_admits_once_and_not_after_its_channel_s_end() -> None:
    async with listening() as listener:
        inbox, other = Inbox(listener), Inbox(listener)
        line = await connect_line(inbox.offer, encode, refuse)
        assert line is not None
        line.put(b"1")
        assert await inbox.next() == b"1"
        listener.withdraw(other.token)
        for offer in (inbox.offer, other.offer):
            late = await connect_line(offer, encode, refuse)
            assert late is not None
            await asyncio.wait_for(late.lost, WAIT_S)
        line.abort()


async def test_a_peer_that_does_not_read_is_found_out() -> None:
    async with listening() as listener:
        sock = stranger(inbox := Inbox(listener))
        sock.sendall(frame(inbox.token))
        await asyncio.wait_for(inbox.attached.wait(), WAIT_S)
        assert inbox.line is not None
        big = bytes(MAX_MESSAGE_BYTES // 2)
        taken = 0
        while inbox.line.put(big):
            taken += 1
            assert taken < 4 * MAX_WAITING_BYTES // len(big)
            await asyncio.sleep(0)
        inbox.line.abort()
        sock.close()


async def test_where_the_socket_is_not_there_frames_go_by_grpc() -> None:
    offer = msgspec.msgpack.encode(["baton-nobody-listens-here", b"0" * 16])
    for unusable in (offer, b"garbage", b""):
        assert await connect_line(unusable, encode, refuse) is None


async def test_transfers_on_one_host_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[ControlLine[SenderFrame]] = []

    async def connect(
        offer: bytes, encode: Callable[[list[SenderFrame]], bytes], on_message: Callable[[bytes], None]
    ) -> ControlLine[SenderFrame] | None:
        line = await connect_line(offer, encode, on_message)
        assert line is not None
        lines.append(line)
        return line

    monkeypatch.setattr("kv_transfer.peer_channel.connect_line", connect)
    ids = list(range(20, 40))
    store = NumpyKvStore(SMALL, 64, seed=1)
    with remote_decode(DecodeOptions(shares_ring=True)) as decode:
        async with sending(store) as sender:
            outbound = Outbound(sender, "line", await away(decode.reserve, "line", ids), len(ids))
            outbound.send_all(ids)
            await outbound.result()
            assert await away(decode.ask, "blocks", ids) == store.blocks(ids)
            assert not lines[0].lost.done()
        await asyncio.wait_for(lines[0].lost, WAIT_S)
