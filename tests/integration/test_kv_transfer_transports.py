"""What every transport keeps: two of them in one process, or one in another that dies."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import pytest

from kv_transfer.transport.base import Endpoint, Region, Transport, TransportError, TransportFault
from tests.kv_fakes import WAIT_S, num_threads_and_fds, transport_of

RING_BYTES = 1 << 20
KINDS = ["ucx", "ucx tcp", "sockets"]


def start(kind: str) -> Transport:
    transport = transport_of(kind)
    transport.start()
    return transport


def put(endpoint: Endpoint, source: Region, offset: int, target: int, size: int, timeout_s: float = WAIT_S) -> object:
    """Put and wait; None or the error."""
    results: queue.SimpleQueue[TransportError | None] = queue.SimpleQueue()
    endpoint.put(source, offset, target, size, timeout_s, results.put)
    result = results.get(timeout=WAIT_S)
    assert results.empty(), "told twice"
    return result


def lost_is_a_surprise(error: TransportError) -> None:
    raise AssertionError(error)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Region, Region, Endpoint]]:
    """Ring of one transport, staging of another, and the endpoint between them."""
    receiver, sender = start(request.param), start(request.param)
    ring, staging = receiver.allocate(RING_BYTES), sender.allocate(RING_BYTES)
    staging.view[:] = np.random.default_rng(1).integers(0, 256, RING_BYTES, np.uint8)
    yield ring, staging, sender.connect(ring.descriptor(), lost_is_a_surprise).result(WAIT_S)
    sender.close()
    receiver.close()


def test_a_put_that_is_told_as_complete_is_in_the_ring(pair: tuple[Region, Region, Endpoint]) -> None:
    ring, staging, endpoint = pair
    assert not ring.view.any()
    for offset, target, size in [(0, 0, RING_BYTES), (5, 77, 1000), (123, RING_BYTES - 1, 1), (9, 9, 0)]:
        ring.view[:] = 0
        assert put(endpoint, staging, offset, target, size) is None
        assert (ring.view[target : target + size] == staging.view[offset : offset + size]).all()
        assert ring.view.astype(bool).sum() <= size


def test_puts_in_great_number_all_arrive(pair: tuple[Region, Region, Endpoint]) -> None:
    ring, staging, endpoint = pair
    size, done = 4096, threading.Semaphore(0)
    errors: list[TransportError] = []

    def one_done(error: TransportError | None) -> None:
        errors.extend([error] if error else [])
        done.release()

    for offset in range(0, RING_BYTES, size):
        endpoint.put(staging, offset, RING_BYTES - size - offset, size, WAIT_S, one_done)
    for _ in range(RING_BYTES // size):
        assert done.acquire(timeout=WAIT_S)
    assert errors == []
    assert (ring.view.reshape(-1, size)[::-1] == staging.view.reshape(-1, size)).all()


@pytest.mark.parametrize(
    ("offset", "target", "size"),
    [(0, RING_BYTES - 9, 10), (RING_BYTES - 9, 0, 10), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 1 << 62, 1)],
)
def test_a_put_out_of_bounds_is_refused_and_touches_nothing(
    pair: tuple[Region, Region, Endpoint], offset: int, target: int, size: int
) -> None:
    ring, staging, endpoint = pair
    error = put(endpoint, staging, offset, target, size)
    assert isinstance(error, TransportError)
    assert error.fault is TransportFault.OUT_OF_BOUNDS
    assert not ring.view.any()
    assert put(endpoint, staging, 0, 0, 16) is None


def test_a_closed_endpoint_refuses_puts_and_closes_again(pair: tuple[Region, Region, Endpoint]) -> None:
    _, staging, endpoint = pair
    endpoint.close().result(WAIT_S)
    endpoint.close().result(WAIT_S)
    error = put(endpoint, staging, 0, 0, 16)
    assert isinstance(error, TransportError)
    assert error.fault is TransportFault.CLOSED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("descriptor", [b"", b"garbage", b"\x94\xc4\x00\x00\x00\xc4\x00"])
def test_a_descriptor_that_is_none_is_refused(descriptor: bytes, kind: str) -> None:
    transport = start(kind)
    with pytest.raises(TransportError) as caught:
        transport.connect(descriptor, lost_is_a_surprise).result(WAIT_S)
    assert caught.value.fault is TransportFault.BAD_DESCRIPTOR
    transport.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_transport_refuses_everything_and_closes_again(kind: str) -> None:
    transport = start(kind)
    ring = transport.allocate(4096)
    endpoint = transport.connect(ring.descriptor(), lost_is_a_surprise).result(WAIT_S)
    transport.close()
    transport.close()
    error = put(endpoint, ring, 0, 0, 16)
    assert isinstance(error, TransportError)
    assert error.fault is TransportFault.CLOSED
    endpoint.close().result(WAIT_S)
    with pytest.raises(TransportError):
        transport.connect(ring.descriptor(), lost_is_a_surprise).result(WAIT_S)
    with pytest.raises(TransportError):
        transport.allocate(4096)


@pytest.mark.parametrize("kind", KINDS)
def test_opened_and_closed_again_and_again_it_leaves_no_thread_and_no_descriptor(kind: str) -> None:
    counts = []
    for _ in range(4):
        receiver, sender = start(kind), start(kind)
        ring, staging = receiver.allocate(4096), sender.allocate(4096)
        endpoint = sender.connect(ring.descriptor(), lost_is_a_surprise).result(WAIT_S)
        assert put(endpoint, staging, 0, 0, 4096) is None
        sender.close()
        receiver.close()
        counts.append(num_threads_and_fds())
    assert counts[-1] == counts[1]


def _ring_in_another_process(pipe: Connection, kind: str) -> None:
    transport = start(kind)
    ring = transport.allocate(RING_BYTES)
    pipe.send(ring.descriptor())
    pipe.recv()


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_peer_is_told_once_and_all_puts_end(kind: str) -> None:
    spawn = get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_ring_in_another_process, args=(theirs, kind), daemon=True)
    process.start()
    sender = start(kind)
    staging = sender.allocate(RING_BYTES)
    lost: queue.SimpleQueue[TransportError] = queue.SimpleQueue()
    endpoint = sender.connect(mine.recv(), lost.put).result(WAIT_S)
    assert put(endpoint, staging, 0, 0, RING_BYTES) is None
    process.kill()
    process.join(WAIT_S)
    error = put(endpoint, staging, 0, 0, RING_BYTES)
    assert isinstance(error, TransportError)
    assert lost.get(timeout=WAIT_S).fault is TransportFault.PEER_LOST
    error = put(endpoint, staging, 0, 0, RING_BYTES)
    assert isinstance(error, TransportError)
    sender.close()
    assert lost.empty()


@pytest.mark.parametrize("kind", ["ucx tcp", "sockets"])
def test_a_put_to_a_peer_that_does_not_progress_times_out_and_loses_the_endpoint(kind: str) -> None:
    """Over tcp the target must take part; here it is stopped before it can."""
    spawn = get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=_ring_in_another_process, args=(theirs, kind), daemon=True)
    process.start()
    sender = start(kind)
    staging = sender.allocate(RING_BYTES)
    lost: queue.SimpleQueue[TransportError] = queue.SimpleQueue()
    endpoint = sender.connect(mine.recv(), lost.put).result(WAIT_S)
    assert put(endpoint, staging, 0, 0, 16) is None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        error = put(endpoint, staging, 0, 0, RING_BYTES, timeout_s=0.3)
        assert isinstance(error, TransportError)
        assert error.fault is TransportFault.TIMEOUT
        assert lost.get(timeout=WAIT_S).fault is TransportFault.TIMEOUT
    finally:
        process.kill()
        process.join(WAIT_S)
        sender.close()
