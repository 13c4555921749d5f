"""KV transfer between two processes over real UCX and gRPC on loopback: the bytes arrive, or both sides know better."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing import get_context
from typing import Any

import grpc
import numpy as np
import pytest

from baton.transfer.v1 import transfer_pb2 as pb
from baton.transfer.v1 import transfer_pb2_grpc
from common.errors import BatonError, ErrorKind
from common.kvcache.layout import KvLayout
from kv_transfer import convert
from kv_transfer.frames import Hello
from kv_transfer.sender import KvSender
from kv_transfer.types import Handoff, SenderCallbacks, TransferStats, TransferTarget, WorkerIdentity
from tests.kv_fakes import (
    SMALL,
    WAIT_S,
    DecodeOptions,
    NumpyKvStore,
    RemoteDecode,
    SpoilingTransport,
    kv_format,
    num_threads_and_fds,
    remote_decode,
    transport_of,
)

SHORT_LEASE_S = 0.5
HANDOFF = Handoff(num_computed_tokens=1, first_token_id=42)


@pytest.fixture(scope="module")
def decode() -> Iterator[RemoteDecode]:
    with remote_decode() as remote:
        yield remote


@pytest.fixture(scope="module", params=["ucx", "sockets", "ucx on one host"])
def frail_decode(request: pytest.FixtureRequest) -> Iterator[RemoteDecode]:
    """One with a short lease, for the tests that let it run out."""
    transport, _, one_host = request.param.partition(" ")
    options = DecodeOptions(lease_s=SHORT_LEASE_S, transport=transport, shares_ring=bool(one_host))
    with remote_decode(options) as remote:
        yield remote


@asynccontextmanager
async def sending(
    store: NumpyKvStore,
    *,
    spoils: Callable[[], bool] | None = None,
    transport: str = "ucx",
    lease_s: float = 2.0,
    idle_close_s: float = 60.0,
    fingerprint: str = "model-a",
    staging_slot_bytes: int = 4096,
    require_transport: str = "any",
) -> AsyncIterator[KvSender]:
    inner = transport_of(transport)
    sender = KvSender(
        store,
        kv_format(store.layout, fingerprint),
        WorkerIdentity("prefill-0", "p-1"),
        transport=inner if spoils is None else SpoilingTransport(inner, spoils),
        staging_slots=8,
        staging_slot_bytes=staging_slot_bytes,
        lease_s=lease_s,
        idle_close_s=idle_close_s,
        require_transport=require_transport,
    )
    await sender.start()
    try:
        yield sender
        assert sender.stats().open_transfers == 0
        assert sender.stats().free_staging_slots == 8
    finally:
        await sender.close()


class Outbound:
    """A transfer being sent, its callbacks noted."""

    def __init__(
        self,
        sender: KvSender,
        transfer_id: str,
        target: TransferTarget,
        num_blocks: int,
        timeout_s: float = WAIT_S,
        on_gathered: Callable[[int], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.gathered: list[int] = []
        self.ends: list[Any] = []
        self._ended = asyncio.Event()
        callbacks = SenderCallbacks(on_gathered or self.gathered.append, self._on_end)
        self.handle = sender.open(transfer_id, target, num_blocks, callbacks, timeout_s)

    def _on_end(self, result: TransferStats | BatonError) -> None:
        self.ends.append(result)
        self._loop.call_soon_threadsafe(self._ended.set)

    def send_all(self, block_ids: Sequence[int], num_tokens: int = 1) -> None:
        self.handle.push(block_ids)
        self.handle.commit(Handoff(num_tokens, 42))

    async def result(self) -> TransferStats | BatonError:
        async with asyncio.timeout(WAIT_S):
            await self._ended.wait()
        (result,) = self.ends
        return result

    async def error(self) -> BatonError:
        result = await self.result()
        assert isinstance(result, BatonError), result
        return result


async def away(function: Callable[..., Any], *args: Any) -> Any:
    """Ask the other process without holding the event loop up."""
    return await asyncio.to_thread(function, *args)


async def until(decode: RemoteDecode, holds: Callable[[Any], bool]) -> None:
    """Wait for something that the other process's stats show: it can't tell us by an event."""
    async with asyncio.timeout(WAIT_S):
        while not holds(await away(decode.stats)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def all_slots_free(stats: Any) -> bool:
    return stats.slots["free"] == sum(stats.slots.values()) and stats.open_transfers == 0


LAYOUTS = {
    "several blocks a slot": SMALL,
    "bfloat16, odd sizes": KvLayout(num_layers=5, block_size=3, num_kv_heads=1, head_dim=10, dtype="bfloat16"),
    "a block split by layers": KvLayout(num_layers=7, block_size=4, num_kv_heads=4, head_dim=8, dtype="float32"),
    "one layer a slot": KvLayout(num_layers=3, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32"),
}


LANES = {"ucx": "cma/memory", "ucx tcp": "tcp/lo", "sockets": "sockets/127.0.0.1"}


@pytest.mark.parametrize(
    ("name", "transport"),
    [*((name, "ucx") for name in LAYOUTS), *(("a block split by layers", kind) for kind in ("ucx tcp", "sockets"))],
)
async def test_the_very_bytes_arrive_in_the_right_blocks(name: str, transport: str) -> None:
    layout, rng = LAYOUTS[name], random.Random(name)
    store = NumpyKvStore(layout, 64, seed=1)
    with remote_decode(DecodeOptions(layout=layout, transport=transport)) as decode:
        async with sending(store, transport=transport) as sender:
            for number in range(3):
                num_blocks = rng.randint(1, 30)
                sources, targets = rng.sample(range(64), num_blocks), rng.sample(range(64), num_blocks)
                expected = store.blocks(sources)
                target = await away(decode.reserve, f"t{number}", targets)
                outbound = Outbound(sender, f"t{number}", target, num_blocks)
                rest = list(sources)
                while rest:
                    count = rng.randint(1, len(rest))
                    outbound.handle.push(rest[:count])
                    rest = rest[count:]
                outbound.handle.commit(Handoff(num_blocks * layout.block_size, 42))
                stats = await outbound.result()
                assert isinstance(stats, TransferStats)
                assert stats.num_bytes == len(expected)
                assert outbound.gathered == sorted(outbound.gathered)
                assert outbound.gathered[-1] == num_blocks
                outcome = await away(decode.outcome, f"t{number}")
                assert outcome[:2] == ("committed", Handoff(num_blocks * layout.block_size, 42))
                assert await away(decode.ask, "blocks", targets) == expected
            assert LANES[transport] in sender.stats().lanes["decode-0"]


async def test_many_transfers_at_once_share_a_small_ring(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=2)
    async with sending(store) as sender:
        outbounds = []
        for number in range(32):
            blocks = [2 * number, 2 * number + 1]
            target = await away(decode.reserve, f"many-{number}", blocks)
            outbound = Outbound(sender, f"many-{number}", target, 2)
            outbound.send_all(blocks)
            outbounds.append(outbound)
        for outbound in outbounds:
            assert isinstance(await outbound.result(), TransferStats)
    assert await away(decode.ask, "blocks", list(range(64))) == store.blocks(range(64))
    await until(decode, all_slots_free)


async def test_blocks_may_be_overwritten_as_soon_as_they_are_gathered(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=3)
    expected = store.blocks(range(40))
    # Not even a resend reads them again.
    spoiled = iter([True])
    async with sending(store, spoils=lambda: next(spoiled, False)) as sender:
        target = await away(decode.reserve, "early", list(range(40)))

        def overwrite(count: int) -> None:
            store.data[:, :count] = 0xEE

        outbound = Outbound(sender, "early", target, 40, on_gathered=overwrite)
        outbound.send_all(range(40))
        assert isinstance(await outbound.result(), TransferStats)
    assert (store.data[:, :40] == 0xEE).all()
    assert await away(decode.ask, "blocks", list(range(40))) == expected


async def test_only_missing_blocks_travel_and_none_is_fine_too(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=4)
    before = (await away(decode.stats)).bytes_landed
    async with sending(store) as sender:
        target = await away(decode.reserve, "delta", [8, 9], 32)
        assert target.num_cached_tokens == 32
        delta = Outbound(sender, "delta", target, 2)
        delta.send_all([20, 21], num_tokens=40)
        nothing = Outbound(sender, "cached", await away(decode.reserve, "cached", [], 32), 0)
        nothing.handle.commit(Handoff(32, 42))
        assert isinstance(await delta.result(), TransferStats)
        result = await nothing.result()
        assert isinstance(result, TransferStats)
        assert result.num_bytes == 0
    assert (await away(decode.outcome, "cached"))[0] == "committed"
    assert (await away(decode.stats)).bytes_landed - before == len(store.blocks([20, 21]))


async def test_a_spoiled_slot_is_rejected_and_sent_again(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=5)
    before = (await away(decode.stats)).pieces_rejected
    spoiled = iter([True, False, True])  # two at most hit one piece, whatever the order: it has three tries
    async with sending(store, spoils=lambda: next(spoiled, False)) as sender:
        target = await away(decode.reserve, "spoiled", list(range(12)))
        outbound = Outbound(sender, "spoiled", target, 12)
        outbound.send_all(range(12))
        assert isinstance(await outbound.result(), TransferStats)
        assert sender.stats().pieces_resent == 2
    assert await away(decode.ask, "blocks", list(range(12))) == store.blocks(range(12))
    assert (await away(decode.stats)).pieces_rejected == before + 2


async def test_a_line_that_always_spoils_fails_both_sides(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=6)
    async with sending(store, spoils=lambda: True) as sender:
        outbound = Outbound(sender, "hopeless", await away(decode.reserve, "hopeless", [1]), 1)
        outbound.send_all([1])
        assert (await outbound.error()).kind is ErrorKind.CORRUPT_KV
    assert (await away(decode.outcome, "hopeless"))[:2] == ("failed", ErrorKind.CORRUPT_KV)
    await until(decode, all_slots_free)


async def test_aborts_at_any_moment_from_either_side_leave_nothing_behind(decode: RemoteDecode) -> None:
    rng, store = random.Random(7), NumpyKvStore(SMALL, 64, seed=7)
    async with sending(store) as sender:

        async def one(number: int) -> None:
            transfer_id, blocks = f"storm-{number}", list(range(4 * (number % 16), 4 * (number % 16) + 4))
            target = await away(decode.reserve, transfer_id, blocks)
            outbound = Outbound(sender, transfer_id, target, 4)
            fate = rng.choice(["commit", "sender aborts", "receiver releases"])
            for block in blocks:
                outbound.handle.push([block])
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.004)
            if fate != "sender aborts":
                outbound.handle.commit(HANDOFF)
            if fate == "sender aborts":
                outbound.handle.abort()
            elif fate == "receiver releases":
                await away(decode.ask, "release", transfer_id, blocks)
            result = await outbound.result()
            if fate == "commit":
                assert isinstance(result, TransferStats)
            elif fate == "sender aborts":
                assert isinstance(result, BatonError)
                assert (await away(decode.outcome, transfer_id))[:2] == ("failed", ErrorKind.CANCELLED)
            else:
                assert await away(decode.ask, "unchanged_since_release", transfer_id, blocks)
                assert await away(decode.ask, "num_outcomes", transfer_id) <= 1

        for first in range(0, 64, 16):
            await asyncio.gather(*(one(number) for number in range(first, first + 16)))
    await until(decode, all_slots_free)


async def test_a_release_reaches_the_sender(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=8)
    async with sending(store) as sender:
        outbound = Outbound(sender, "released", await away(decode.reserve, "released", [1, 2]), 2)
        outbound.handle.push([1])
        await until(decode, lambda stats: stats.open_transfers == 1)
        await away(decode.ask, "release", "released", [1, 2])
        assert (await outbound.error()).kind in (ErrorKind.CANCELLED, ErrorKind.LEASE_LOST)
    assert await away(decode.ask, "num_outcomes", "released") == 0


async def test_a_reservation_that_nobody_opens_expires(decode: RemoteDecode) -> None:
    await away(decode.reserve, "forgotten", [1], 0, 0.2)
    assert (await away(decode.outcome, "forgotten"))[:2] == ("failed", ErrorKind.DEADLINE_EXCEEDED)


async def test_a_transfer_that_is_not_committed_in_time_expires_on_both_sides(decode: RemoteDecode) -> None:
    async with sending(NumpyKvStore(SMALL, 64, seed=9)) as sender:
        target = await away(decode.reserve, "late", [1, 2], 0, 0.6)
        outbound = Outbound(sender, "late", target, 2, timeout_s=0.6)
        outbound.handle.push([1])
        assert (await outbound.error()).kind is ErrorKind.DEADLINE_EXCEEDED
    assert (await away(decode.outcome, "late"))[:2] == ("failed", ErrorKind.DEADLINE_EXCEEDED)
    await until(decode, all_slots_free)


async def test_a_stranger_with_a_wrong_secret_gets_nothing_and_harms_nothing(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=10)
    before = (await away(decode.stats)).dropped_frames.get("wrong_secret", 0)
    async with sending(store) as sender:
        target = await away(decode.reserve, "wanted", [3])
        # An honest neighbour on the same channel, without which the stranger would not even be welcomed.
        first = Outbound(sender, "first", await away(decode.reserve, "first", [4]), 1)
        first.send_all([4])
        assert isinstance(await first.result(), TransferStats)
        guess = Outbound(sender, "wanted", decode.target(bytes(16)), 1)
        guess.send_all([5])
        never_made = Outbound(sender, "unheard-of", decode.target(bytes(16)), 1)
        refusals = [await guess.error(), await never_made.error()]
        assert [error.kind for error in refusals] == [ErrorKind.LEASE_LOST] * 2
        assert refusals[0].message.replace("wanted", "unheard-of") == refusals[1].message
        honest = Outbound(sender, "wanted", target, 1)
        honest.send_all([6])
        assert isinstance(await honest.result(), TransferStats)
    assert await away(decode.ask, "blocks", [3]) == store.blocks([6])
    assert (await away(decode.stats)).dropped_frames["wrong_secret"] == before + 1


async def test_more_or_fewer_bytes_than_reserved_are_refused_with_both_numbers(decode: RemoteDecode) -> None:
    async with sending(NumpyKvStore(SMALL, 64, seed=11)) as sender:
        outbound = Outbound(sender, "more", await away(decode.reserve, "more", [3]), 2)
        error = await outbound.error()
        unit = 3 * SMALL.block_bytes
        assert error.kind is ErrorKind.INTERNAL
        assert str(2 * unit) in error.message
        assert f"lacks {unit}" in error.message


async def test_a_stale_epoch_is_refused(decode: RemoteDecode) -> None:
    async with sending(NumpyKvStore(SMALL, 64, seed=12)) as sender:
        outbound = Outbound(sender, "stale", decode.target(bytes(16), epoch="epoch-0"), 1)
        error = await outbound.error()
        assert error.kind is ErrorKind.STALE_EPOCH
        assert "epoch-0" in error.message
        assert "epoch-1" in error.message


MISFITS = {
    "dtype": (KvLayout(3, 4, 2, 8, "bfloat16"), ("'float32'", "'bfloat16'")),
    "num_layers": (KvLayout(4, 4, 2, 8, "float32"), ("3", "4")),
    "head_dim": (KvLayout(3, 4, 2, 16, "float32"), ("8", "16")),
    "KV heads": (KvLayout(3, 4, 1, 8, "float32", first_kv_head=1, tp_rank=1, tp_size=2), ("0 to 1", "1 to 1", "of 2")),
    "fingerprint": (SMALL, ("model-a", "model-b")),
}


@pytest.mark.parametrize("field", MISFITS)
async def test_formats_that_do_not_fit_are_refused_with_both_values(decode: RemoteDecode, field: str) -> None:
    layout, values = MISFITS[field]
    fingerprint = "model-b" if field == "fingerprint" else "model-a"
    target = await away(decode.reserve, f"misfit-{field}", [1])
    async with sending(NumpyKvStore(layout, 64, seed=13), fingerprint=fingerprint) as sender:
        error = await Outbound(sender, f"misfit-{field}", target, 1).error()
        assert error.kind is ErrorKind.INTERNAL
        assert all(value in error.message for value in (field, *values))
    await away(decode.ask, "release", f"misfit-{field}", [1])


SHAPES = {
    "larger blocks": KvLayout(3, 8, 2, 8, "float32"),
    "smaller blocks": KvLayout(3, 3, 2, 8, "float32"),
    "more heads": KvLayout(3, 4, 4, 8, "float32"),
    "both": KvLayout(3, 6, 6, 8, "float32"),
}


@pytest.mark.parametrize("name", SHAPES)
async def test_blocks_of_another_shape_fill_the_receivers(decode: RemoteDecode, name: str) -> None:
    layout, num_tokens, held = SHAPES[name], 50, 8
    store = NumpyKvStore(layout, 64, seed=22)
    first, end = held // layout.block_size, -(-num_tokens // layout.block_size)
    targets = random.Random(name).sample(range(64), -(-(num_tokens - held) // SMALL.block_size))
    target = await away(decode.reserve, name, targets, held)
    async with sending(store) as sender:
        outbound = Outbound(sender, name, target, end - first)
        outbound.send_all(range(first, end), num_tokens=num_tokens)
        assert isinstance(await outbound.result(), TransferStats)
    received = NumpyKvStore(SMALL, len(targets))
    received.data[:] = np.frombuffer(await away(decode.ask, "blocks", targets), np.uint8).reshape(received.data.shape)
    for token in range(held, num_tokens):
        block, offset = divmod(token - held, SMALL.block_size)
        got = received.by_token()[:, block, :, :, offset]
        block, offset = divmod(token, layout.block_size)
        assert (got == store.by_token()[:, block, :, : SMALL.num_kv_heads, offset]).all()


async def test_who_shows_no_secret_of_a_reservation_is_not_told_where_to_put(decode: RemoteDecode) -> None:
    await away(decode.reserve, "someone's", [3])
    for transfer_id, secret in (("someone's", bytes(16)), ("nobody's", bytes(16)), ("", b"")):
        hello = Hello(WorkerIdentity("stranger", "s"), "epoch-1", kv_format(), transfer_id, secret)
        async with grpc.aio.insecure_channel(decode.address) as channel:
            call = transfer_pb2_grpc.TransferServiceStub(channel).Channel()
            await call.write(convert.sender_frames_to_proto([hello]))
            with pytest.raises(grpc.aio.AioRpcError, match="learns nothing") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.ABORTED
    await away(decode.ask, "release", "someone's", [3])


async def test_a_lane_that_is_not_of_the_kind_required_is_refused_and_both_are_named() -> None:
    """This host has shared memory, so the sender starts; the peer does not offer it: a silent fallback else."""
    with remote_decode(DecodeOptions(transport="ucx tcp")) as decode:
        target = await away(decode.reserve, "t", [1])
        async with sending(NumpyKvStore(SMALL, 64, seed=23), require_transport="shm") as sender:
            error = await Outbound(sender, "t", target, 1).error()
            assert error.kind is ErrorKind.INTERNAL
            assert "require_transport is shm, what is there is tcp/lo" in error.message


async def test_transports_that_differ_are_refused_and_both_are_named(decode: RemoteDecode) -> None:
    target = await away(decode.reserve, "other-transport", [1])
    async with sending(NumpyKvStore(SMALL, 64, seed=24), transport="sockets") as sender:
        error = await Outbound(sender, "other-transport", target, 1).error()
        assert "'sockets' here, 'ucx' there" in error.message
    await away(decode.ask, "release", "other-transport", [1])


async def test_garbage_instead_of_a_hello_is_refused(decode: RemoteDecode) -> None:
    async with grpc.aio.insecure_channel(decode.address) as channel:
        for request in (pb.ChannelRequest(), pb.ChannelRequest(frames=[pb.SenderFrame(heartbeat=pb.Heartbeat())])):
            call = transfer_pb2_grpc.TransferServiceStub(channel).Channel()
            await call.write(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_peer_that_is_not_there_fails_transfers_at_once() -> None:
    async with sending(NumpyKvStore(SMALL, 64, seed=14)) as sender:
        target = TransferTarget("127.0.0.1:1", WorkerIdentity("nobody", "e"), bytes(16), 0)
        error = await Outbound(sender, "t", target, 1).error()
        assert error.kind is ErrorKind.LEASE_LOST
        assert "127.0.0.1:1" in error.message


async def test_an_idle_channel_is_closed_and_opened_again_when_needed(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=15)
    async with sending(store, idle_close_s=0.1) as sender:
        for number in range(2):
            transfer_id = f"idle-{number}"
            outbound = Outbound(sender, transfer_id, await away(decode.reserve, transfer_id, [number]), 1)
            outbound.send_all([number])
            assert isinstance(await outbound.result(), TransferStats)
            await until(decode, lambda stats: stats.num_channels == 0)


async def test_a_sender_that_closes_tells_its_receivers(decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=16)
    async with sending(store) as sender:
        outbound = Outbound(sender, "closing", await away(decode.reserve, "closing", [1, 2]), 2)
        outbound.handle.push([1])
        await until(decode, lambda stats: stats.num_channels == 1)
        await sender.close()
        assert (await outbound.error()).kind is ErrorKind.DRAINING
        with pytest.raises(BatonError):
            sender.open("after", decode.target(bytes(16)), 1, SenderCallbacks(print, print), 1.0)
    assert (await away(decode.outcome, "closing"))[0] == "failed"
    await until(decode, all_slots_free)


async def test_a_receiver_that_closes_tells_its_senders_and_leaves_nothing() -> None:
    store = NumpyKvStore(SMALL, 64, seed=17)
    with remote_decode() as decode:
        async with sending(store) as sender:
            done = Outbound(sender, "done", await away(decode.reserve, "done", [3]), 1)
            done.send_all([3])
            assert isinstance(await done.result(), TransferStats)
            outbound = Outbound(sender, "open", await away(decode.reserve, "open", [1, 2]), 2)
            outbound.handle.push([1])
            await until(decode, lambda stats: stats.pieces_landed == 2)
            report = await away(decode.stop)
            assert (await outbound.error()).kind is ErrorKind.DRAINING
    assert report["stats"].num_channels == 0
    assert all_slots_free(report["stats"])
    (_, descriptors_before), (_, descriptors_after) = report["before"], report["after"]
    assert descriptors_after <= descriptors_before


async def test_a_sender_opened_and_closed_again_and_again_leaves_no_thread_and_no_descriptor(
    decode: RemoteDecode,
) -> None:
    store = NumpyKvStore(SMALL, 64, seed=18)
    counts = []
    for number in range(4):
        transfer_id = f"again-{number}"
        target = decode.reserve(transfer_id, [number])
        async with sending(store) as sender:
            outbound = Outbound(sender, transfer_id, target, 1)
            outbound.send_all([number])
            assert isinstance(await outbound.result(), TransferStats)
        counts.append(num_threads_and_fds())
    # gRPC closes its sockets a moment after the channel.
    async with asyncio.timeout(WAIT_S):
        while num_threads_and_fds() > counts[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# Deaths


@pytest.mark.parametrize("transport", ["ucx", "sockets"])
async def test_a_killed_receiver_fails_its_transfers_and_the_next_incarnation_serves(transport: str) -> None:
    store = NumpyKvStore(SMALL, 64, seed=19)
    async with sending(store, transport=transport) as sender:
        with remote_decode(DecodeOptions(transport=transport)) as decode:
            outbound = Outbound(sender, "t", await away(decode.reserve, "t", list(range(30))), 30)
            outbound.handle.push(range(20))
            await until(decode, lambda stats: stats.pieces_landed > 0)
            os.kill(decode.process.pid, signal.SIGKILL)
            assert (await outbound.error()).kind is ErrorKind.LEASE_LOST
        with remote_decode(DecodeOptions(epoch="epoch-2", transport=transport)) as decode:
            outbound = Outbound(sender, "t", await away(decode.reserve, "t", [1]), 1)
            outbound.send_all([1])
            assert isinstance(await outbound.result(), TransferStats)


async def test_a_stopped_receiver_is_given_up_and_finds_out_when_it_wakes(frail_decode: RemoteDecode) -> None:
    store = NumpyKvStore(SMALL, 64, seed=20)
    async with sending(store, lease_s=SHORT_LEASE_S, transport=frail_decode.options.transport) as sender:
        outbound = Outbound(sender, "stopped", await away(frail_decode.reserve, "stopped", [1, 2]), 2)
        outbound.handle.push([1])
        await until(frail_decode, lambda stats: stats.slots["free"] == 8 and stats.pieces_landed > 0)
        os.kill(frail_decode.process.pid, signal.SIGSTOP)
        try:
            outbound.handle.push([2])
            assert (await outbound.error()).kind is ErrorKind.LEASE_LOST
        finally:
            os.kill(frail_decode.process.pid, signal.SIGCONT)
        assert (await away(frail_decode.outcome, "stopped"))[:2] == ("failed", ErrorKind.LEASE_LOST)
        again = Outbound(sender, "woken", await away(frail_decode.reserve, "woken", [1]), 1)
        again.send_all([1])
        assert isinstance(await again.result(), TransferStats)
    await until(frail_decode, all_slots_free)


def _half_a_transfer(target: TransferTarget, transfer_id: str, transport: str) -> None:
    """In a process of its own: push half of what was promised, and say nothing more."""

    async def run() -> None:
        async with sending(NumpyKvStore(SMALL, 64, seed=21), lease_s=SHORT_LEASE_S, transport=transport) as sender:
            outbound = Outbound(sender, transfer_id, target, 8)
            outbound.handle.push(range(4))
            await outbound.result()

    asyncio.run(run())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_stops_is_noticed_and_its_slots_come_back(
    frail_decode: RemoteDecode, how: signal.Signals
) -> None:
    transfer_id, blocks = f"half-{how.name}", list(range(8))
    landed = (await away(frail_decode.stats)).pieces_landed
    target = await away(frail_decode.reserve, transfer_id, blocks)
    arguments = (target, transfer_id, frail_decode.options.transport)
    process = get_context("spawn").Process(target=_half_a_transfer, args=arguments, daemon=True)
    process.start()
    try:
        await until(frail_decode, lambda stats: stats.pieces_landed > landed)
        assert process.pid is not None
        os.kill(process.pid, how)
        outcome = await away(frail_decode.outcome, transfer_id)
        assert outcome[:2] == ("failed", ErrorKind.LEASE_LOST)
        await until(frail_decode, all_slots_free)
        if how is signal.SIGSTOP:
            # A late riser must not write into what is others' by now.
            before = await away(frail_decode.ask, "blocks", blocks)
            os.kill(process.pid, signal.SIGCONT)
            await away(process.join, WAIT_S)
            assert await away(frail_decode.ask, "blocks", blocks) == before
    finally:
        process.kill()
        process.join(WAIT_S)
