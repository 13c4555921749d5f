"""KV between two hosts made of network namespaces: which way it takes; what delay, loss and a cut cable do to it."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

from common.errors import BatonError, ErrorKind
from kv_transfer.sender import KvSender
from kv_transfer.types import Handoff, SenderCallbacks, TransferStats, TransferTarget, WorkerIdentity
from tests.kv_fakes import (
    SMALL,
    WAIT_S,
    DecodeOptions,
    NumpyKvStore,
    RemoteDecode,
    kv_format,
    remote_decode,
    transport_of,
)
from tests.netns import DEVICE, FAR, NEAR, Hosts, enter, two_hosts

LEASE_S = 3.0  # longer than three retransmissions of one packet take, each of which may be lost
NUM_BLOCKS = 48
SEED = 31


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


def _send(pipe: Connection, netns: str, transport: str, targets: list[TransferTarget], halt: bool) -> None:
    """In a process on the near host: one transfer after the other; results go up the pipe. halt: half way, for good."""
    enter(netns)

    async def run() -> None:
        store = NumpyKvStore(SMALL, NUM_BLOCKS, seed=SEED)
        sender = KvSender(
            store,
            kv_format(),
            WorkerIdentity("prefill-0", "p-1"),
            transport=transport_of(transport, "", "0.0.0.0"),
            staging_slots=8,
            staging_slot_bytes=4096,
            lease_s=LEASE_S,
        )
        await sender.start()
        for number, target in enumerate(targets):
            ended: queue.SimpleQueue[TransferStats | BatonError] = queue.SimpleQueue()
            callbacks = SenderCallbacks(lambda _: None, ended.put)
            handle = sender.open(f"t{number}", target, NUM_BLOCKS, callbacks, WAIT_S)
            handle.push(range(NUM_BLOCKS // 2 if halt else NUM_BLOCKS))
            if not halt:
                handle.commit(Handoff(NUM_BLOCKS * SMALL.block_size, 1))
            began = time.monotonic()
            result = await asyncio.to_thread(ended.get)
            lanes = sender.stats().lanes.get("decode-0", ())
            pipe.send((result if isinstance(result, TransferStats) else result.kind, time.monotonic() - began, lanes))
        await sender.close()

    asyncio.run(run())


class Far:
    """A decode worker's transfer end on the far host, and what it takes to send to it from the near one."""

    def __init__(self, hosts: Hosts, decode: RemoteDecode, transport: str) -> None:
        self.hosts, self.decode, self.transport = hosts, decode, transport

    def start(self, number: int = 1, *, halt: bool = False) -> tuple[Any, Connection]:
        targets = [self.decode.reserve(f"t{i}", range(NUM_BLOCKS)) for i in range(number)]
        spawn = get_context("spawn")
        mine, theirs = spawn.Pipe()
        arguments = (theirs, self.hosts.near, self.transport, targets, halt)
        process = spawn.Process(target=_send, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, mine

    def results(self, process: Any, pipe: Connection, number: int = 1) -> list[tuple[Any, float, tuple[str, ...]]]:
        try:
            results = []
            for _ in range(number):
                assert pipe.poll(WAIT_S), "the sender hangs"
                results.append(pipe.recv())
            return results
        finally:
            process.kill()
            process.join(WAIT_S)
            pipe.close()


# Without "tcp" UCX sees that both are one machine, and copies between the processes whatever their networks.
@pytest.fixture(params=["ucx tcp", "sockets"])
def far(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Far]:
    hosts.cable.delay_s = hosts.cable.loss = 0.0
    options = DecodeOptions(
        lease_s=LEASE_S, transport=request.param, netns=hosts.far, devices="", host="0.0.0.0", advertise=FAR
    )
    with remote_decode(options) as decode:
        yield Far(hosts, decode, request.param)


def arrived(far: Far) -> bool:
    sent = NumpyKvStore(SMALL, NUM_BLOCKS, seed=SEED).blocks(range(NUM_BLOCKS))
    return bool(far.decode.ask("blocks", list(range(NUM_BLOCKS))) == sent)


def test_the_advertised_address_is_dialled_and_the_way_that_leads_there_is_taken(far: Far) -> None:
    ((result, _, lanes),) = far.results(*far.start())
    assert isinstance(result, TransferStats)
    assert arrived(far)
    assert lanes == (f"tcp/{DEVICE}",) if far.transport == "ucx tcp" else lanes == (f"sockets/{NEAR}",)


def test_delay_and_loss_cost_time_and_no_byte(far: Far) -> None:
    far.hosts.cable.delay_s, far.hosts.cable.loss = 0.015, 0.01
    results = far.results(*far.start(3), 3)
    assert all(isinstance(result, TransferStats) for result, _, _ in results)
    assert [far.decode.outcome(f"t{i}")[0] for i in range(3)] == ["committed"] * 3
    assert arrived(far)


def test_a_cut_cable_is_known_on_both_sides_and_a_mended_one_carries_again(far: Far) -> None:
    process, pipe = far.start(halt=True)
    deadline = time.monotonic() + WAIT_S
    while far.decode.stats().pieces_landed == 0:
        assert time.monotonic() < deadline, "nothing arrives"
    far.hosts.cable.is_cut = True
    try:
        ((result, _, _),) = far.results(process, pipe)
        assert result is ErrorKind.LEASE_LOST
        outcome = far.decode.outcome("t0")
        assert outcome[:2] == ("failed", ErrorKind.LEASE_LOST)
    finally:
        far.hosts.cable.is_cut = False
    ((result, _, _),) = far.results(*far.start())
    assert isinstance(result, TransferStats)
    assert arrived(far)
