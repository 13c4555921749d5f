"""What only plain sockets have: a port that strangers may find."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_transfer.transport import sockets
from kv_transfer.transport.base import TransportError
from kv_transfer.transport.sockets import SocketsDescriptor, SocketsRegion, SocketsSettings, SocketsTransport
from kv_transfer.transport.sockets_wire import ACK, ACK_OUT_OF_BOUNDS, HEADER, MAGIC
from tests.kv_fakes import WAIT_S

REGION_BYTES = 4096


@pytest.fixture
def receiver() -> Iterator[SocketsTransport]:
    transport = SocketsTransport(SocketsSettings())
    transport.start()
    yield transport
    transport.close()


def target_of(region: SocketsRegion) -> SocketsDescriptor:
    return msgspec.msgpack.decode(region.descriptor(), type=SocketsDescriptor)


def knock(region: SocketsRegion, *words: bytes) -> bytes:
    """Connect, say that, and return all that is answered until the other side closes."""
    target = target_of(region)
    with socket.create_connection((target.host, target.port), timeout=WAIT_S) as stranger:
        answer = b""
        try:
            for word in words:
                stranger.sendall(word)
            while received := stranger.recv(4096):
                answer += received
        except (ConnectionResetError, BrokenPipeError):
            pass
        return answer


def put_honestly(region: SocketsRegion, value: int) -> Any:
    sender = SocketsTransport(SocketsSettings())
    sender.start()
    try:
        staging = sender.allocate(REGION_BYTES)
        staging.view[:] = value
        endpoint = sender.connect(region.descriptor(), lambda _: None).result(WAIT_S)
        results: queue.SimpleQueue[TransportError | None] = queue.SimpleQueue()
        endpoint.put(staging, 0, 0, REGION_BYTES, WAIT_S, results.put)
        return results.get(timeout=WAIT_S)
    finally:
        sender.close()


@pytest.mark.parametrize("hello", [b"x" * 24, MAGIC + bytes(16), b"GET / HTTP/1.1\r\nHost: baton\r\n\r\n"])
def test_who_does_not_show_the_token_is_cut_off_and_writes_nothing(receiver: SocketsTransport, hello: bytes) -> None:
    region = receiver.allocate(REGION_BYTES)
    assert knock(region, hello, HEADER.pack(0, 0, 8), b"injected") == b""
    assert not region.view.any()
    assert put_honestly(region, 7) is None
    assert (region.view == 7).all()


def test_one_regions_token_opens_no_other(receiver: SocketsTransport) -> None:
    mine, other = receiver.allocate(REGION_BYTES), receiver.allocate(REGION_BYTES)
    assert knock(other, MAGIC + target_of(mine).token, HEADER.pack(0, 0, 8), b"injected") == b""
    assert not other.view.any()


@pytest.mark.parametrize(("offset", "size"), [(REGION_BYTES - 4, 8), (1 << 63, 8), (0, REGION_BYTES + 1), (0, 1 << 63)])
def test_a_put_out_of_bounds_is_refused_by_the_receiver_too(receiver: SocketsTransport, offset: int, size: int) -> None:
    region = receiver.allocate(REGION_BYTES)
    answer = knock(region, MAGIC + target_of(region).token, HEADER.pack(3, offset, size), b"injected")
    assert answer in (ACK.pack(3, ACK_OUT_OF_BOUNDS), b""), "the reset may overtake the answer"
    assert not region.view.any()


def test_who_says_nothing_is_not_waited_for(receiver: SocketsTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HELLO_TIMEOUT_S", 0.05)
    region = receiver.allocate(REGION_BYTES)
    assert knock(region) == b""
    assert put_honestly(region, 9) is None


def test_strangers_take_no_more_than_their_number(receiver: SocketsTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_INBOUND", 2)
    region = receiver.allocate(REGION_BYTES)
    target = target_of(region)
    held = [socket.create_connection((target.host, target.port), timeout=WAIT_S) for _ in range(2)]
    assert knock(region, MAGIC) == b""
    for connection in held:
        connection.close()
    assert isinstance(put_honestly(region, 1), TransportError | None)
    assert np.unique(region.view).size == 1, "all of it or nothing"


def test_an_address_that_can_not_be_bound_is_named() -> None:
    transport = SocketsTransport(SocketsSettings("192.0.2.9"))
    transport.start()
    with pytest.raises(TransportError, match=r"192\.0\.2\.9.*host"):
        transport.allocate(REGION_BYTES)
    transport.close()
