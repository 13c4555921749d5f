"""One transfer at the receiver: its blocks are written only while it may write them, and its end is told once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from common.errors import BatonError, ErrorKind
from common.kvcache.checksum import checksum_of
from kv_transfer.frames import CommitTransfer, Manifest, SlotGrant, SlotWritten
from kv_transfer.incoming import MAX_RESENDS, IncomingTransfer, Landing
from kv_transfer.pieces import Piece
from kv_transfer.state import IncomingState
from kv_transfer.types import Handoff, ReceiverCallbacks
from tests.kv_fakes import SMALL, WAIT_S, NumpyKvStore

UNIT = SMALL.block_bytes
BLOCKS = [7, 2, 5]
HANDOFF = Handoff(num_computed_tokens=4 * len(BLOCKS), first_token_id=11)


class Bench:
    """A transfer of three blocks over three layers, opened, with a note of its callbacks."""

    def __init__(self, store: NumpyKvStore | None = None, num_cached_tokens: int = 0) -> None:
        self.store = store or NumpyKvStore(SMALL, 8)
        self.ended: list[Any] = []
        callbacks = ReceiverCallbacks(lambda handoff, stats: self.ended.append((handoff, stats)), self.ended.append)
        self.transfer = IncomingTransfer(
            "t", BLOCKS, num_cached_tokens, callbacks, store=self.store, deadline=9.0, clock=lambda: 1.0
        )
        assert self.transfer.open("channel", SMALL, self.transfer.expected_bytes)
        self.manifest = Manifest()

    def piece(self, piece: Piece, seed: int = 0) -> tuple[SlotWritten, npt.NDArray[np.uint8]]:
        data = np.random.default_rng(seed).integers(0, 256, piece.num_units * UNIT, np.uint8)
        return SlotWritten("t", SlotGrant(0, 1), piece, data.nbytes, checksum_of(data)), data

    def send(self, piece: Piece, seed: int = 0, spoil: bool = False) -> Landing:
        written, data = self.piece(piece, seed)
        assert self.transfer.claim(written)
        if spoil:
            data[len(data) // 2] ^= 1
        else:
            self.manifest = self.manifest.plus(written.num_bytes, written.checksum)
        return self.transfer.land(written, data)

    def commit(self, manifest: Manifest | None = None, handoff: Handoff = HANDOFF) -> bool:
        return self.transfer.set_manifest(CommitTransfer("t", manifest or self.manifest, handoff))

    @property
    def error(self) -> BatonError:
        (error,) = self.ended
        assert isinstance(error, BatonError)
        return error


ALL = Piece(0, 3, 0, 3)
HALVES = [Piece(0, 2, 0, 3), Piece(2, 1, 0, 3)]


def test_everything_landed_and_the_manifest_equal_commits() -> None:
    bench = Bench()
    for seed, piece in enumerate(HALVES):
        assert bench.send(piece, seed) is Landing.ACCEPTED
    assert bench.ended == []
    bench.commit()
    ((handoff, stats),) = bench.ended
    assert (handoff, stats.num_bytes) == (HANDOFF, 9 * UNIT)
    assert bench.transfer.state is IncomingState.COMMITTED
    for seed, piece in enumerate(HALVES):
        _, data = bench.piece(piece, seed)
        expected = data.reshape(piece.num_layers, len(BLOCKS), UNIT)
        assert (bench.store.data[piece.first_layer :][: piece.num_layers][:, BLOCKS] == expected).all()


def test_a_manifest_that_overtakes_the_landings_commits_with_the_last_of_them() -> None:
    bench = Bench()
    written, data = bench.piece(ALL)
    assert bench.transfer.claim(written)
    assert bench.commit(Manifest().plus(written.num_bytes, written.checksum))
    assert bench.ended == []
    bench.transfer.land(written, data)
    assert bench.transfer.state is IncomingState.COMMITTED


def test_nothing_to_send_commits_at_once() -> None:
    ended: list[Any] = []
    callbacks = ReceiverCallbacks(lambda handoff, stats: ended.append(handoff), ended.append)
    transfer = IncomingTransfer("t", [], 12, callbacks, store=NumpyKvStore(SMALL, 8), deadline=9.0, clock=lambda: 1.0)
    assert transfer.expected_bytes == 0
    transfer.open("channel", SMALL, 0)
    transfer.set_manifest(CommitTransfer("t", Manifest(), HANDOFF))
    assert ended == [HANDOFF]


@pytest.mark.parametrize(
    "manifest",
    [Manifest(), Manifest(1, 9 * UNIT, 0), Manifest(2, 9 * UNIT, 1), Manifest(1, 8 * UNIT, 1)],
    ids=["empty", "checksum", "pieces", "bytes"],
)
def test_a_manifest_that_differs_from_what_landed_is_corrupt(manifest: Manifest) -> None:
    bench = Bench()
    bench.send(ALL)
    bench.commit(manifest)
    assert bench.error.kind is ErrorKind.CORRUPT_KV


def test_a_manifest_that_agrees_but_leaves_blocks_empty_is_corrupt() -> None:
    bench = Bench()
    bench.send(HALVES[0])
    bench.commit()
    assert bench.error.kind is ErrorKind.CORRUPT_KV


def test_more_tokens_than_the_blocks_hold_are_corrupt() -> None:
    bench = Bench(num_cached_tokens=4)
    bench.send(ALL)
    bench.commit(handoff=Handoff(17, 1))
    assert bench.error.kind is ErrorKind.CORRUPT_KV
    assert "17 tokens" in bench.error.message
    assert "16" in bench.error.message


def test_a_spoiled_piece_is_refused_and_accepted_when_it_comes_again() -> None:
    bench = Bench()
    assert bench.send(ALL, spoil=True) is Landing.REFUSED
    assert bench.send(ALL) is Landing.ACCEPTED
    bench.commit()
    assert bench.transfer.state is IncomingState.COMMITTED


def test_a_commit_waits_for_a_refused_piece() -> None:
    bench = Bench()
    written, data = bench.piece(ALL)
    bench.send(ALL, spoil=True)
    assert bench.commit(Manifest().plus(written.num_bytes, written.checksum))
    assert bench.ended == []
    assert bench.transfer.claim(written)
    bench.transfer.land(written, data)
    assert bench.transfer.state is IncomingState.COMMITTED


def test_a_piece_spoiled_once_too_often_is_corrupt() -> None:
    bench = Bench()
    for _ in range(MAX_RESENDS):
        bench.send(ALL, spoil=True)
        assert bench.ended == []
    bench.send(ALL, spoil=True)
    assert bench.error.kind is ErrorKind.CORRUPT_KV


@pytest.mark.parametrize("piece", [Piece(0, 4, 0, 3), Piece(0, 1, 2, 2), Piece(0, 0, 0, 0)])
def test_a_piece_out_of_bounds_can_not_be_claimed(piece: Piece) -> None:
    bench = Bench()
    assert not bench.transfer.claim(SlotWritten("t", SlotGrant(0, 1), piece, piece.num_units * UNIT, 0))


@pytest.mark.parametrize("num_bytes", [0, 9 * UNIT - 1, 9 * UNIT + 1, 1 << 40])
def test_a_piece_of_the_wrong_size_can_not_be_claimed(num_bytes: int) -> None:
    bench = Bench()
    assert not bench.transfer.claim(SlotWritten("t", SlotGrant(0, 1), ALL, num_bytes, 0))


def test_a_unit_is_not_written_twice() -> None:
    bench = Bench()
    bench.send(ALL)
    written, _ = bench.piece(HALVES[0], seed=9)
    assert not bench.transfer.claim(written)


@pytest.mark.parametrize("secret", [b"", b"x" * 16, b"x" * 15])
def test_only_its_own_secret_is_accepted(secret: bytes) -> None:
    bench = Bench()
    assert not bench.transfer.accepts_secret(secret)
    assert bench.transfer.accepts_secret(bench.transfer.secret)
    assert len(bench.transfer.secret) == 16
    assert bench.transfer.secret != Bench().transfer.secret


def test_what_has_ended_neither_opens_nor_ends_again() -> None:
    bench = Bench()
    assert bench.transfer.fail(BatonError(ErrorKind.LEASE_LOST, "gone"), IncomingState.EXPIRED)
    assert not bench.transfer.open("other", SMALL, 0)
    assert not bench.transfer.fail(BatonError(ErrorKind.CANCELLED, "again"))
    assert not bench.transfer.release()
    assert not bench.commit()
    assert bench.send(ALL) is Landing.LATE
    assert not bench.store.data.any()
    assert bench.error.kind is ErrorKind.LEASE_LOST


def test_a_callback_that_raises_harms_nobody() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("callback")

    callbacks = ReceiverCallbacks(broken, broken)
    transfer = IncomingTransfer("t", [], 0, callbacks, store=NumpyKvStore(SMALL, 8), deadline=9.0, clock=lambda: 1.0)
    assert transfer.fail(BatonError(ErrorKind.CANCELLED, "x"))


def test_a_store_that_fails_ends_the_transfer() -> None:
    class Broken(NumpyKvStore):
        def scatter(self, *_: object) -> int:
            raise ValueError("no such block")

    bench = Bench(Broken(SMALL, 8))
    bench.send(ALL)
    assert bench.error.kind is ErrorKind.INTERNAL
    assert "no such block" in bench.error.message


class SlowStore(NumpyKvStore):
    """A scatter that waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__(SMALL, 8)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def scatter(self, first_layer: int, num_layers: int, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> int:
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        return super().scatter(first_layer, num_layers, block_ids, data)


@pytest.fixture
def copying() -> Any:
    """A bench with a copy under way in another thread, and that thread."""
    store = SlowStore()
    bench = Bench(store)
    thread = threading.Thread(target=bench.send, args=(ALL,))
    thread.start()
    assert store.entered.wait(WAIT_S)
    yield bench, store, thread
    store.go_on.set()
    thread.join(WAIT_S)


def test_release_waits_for_the_copy_under_way_and_silences_the_callbacks(copying: Any) -> None:
    bench, store, thread = copying
    released = threading.Event()

    def release() -> None:
        bench.transfer.release()
        released.set()

    releaser = threading.Thread(target=release)
    releaser.start()
    # Ended at once for newcomers, though the barrier still waits.
    while bench.transfer.state is IncomingState.RECEIVING:
        pass
    assert not released.is_set()
    store.go_on.set()
    releaser.join(WAIT_S)
    thread.join(WAIT_S)
    assert released.is_set()
    assert bench.ended == []
    before = store.data.copy()
    written, data = bench.piece(ALL, seed=5)
    assert bench.transfer.land(written, data) is Landing.LATE
    assert (store.data == before).all()


def test_on_fail_waits_for_the_copy_under_way(copying: Any) -> None:
    bench, store, thread = copying
    assert bench.transfer.fail(BatonError(ErrorKind.LEASE_LOST, "gone"))
    assert bench.ended == []
    store.go_on.set()
    thread.join(WAIT_S)
    assert bench.error.kind is ErrorKind.LEASE_LOST


def test_release_after_a_failure_takes_the_pending_callback_back(copying: Any) -> None:
    bench, store, thread = copying
    bench.transfer.fail(BatonError(ErrorKind.LEASE_LOST, "gone"))
    releaser = threading.Thread(target=bench.transfer.release)
    releaser.start()
    while bench.transfer._final_call is not None:
        pass
    store.go_on.set()
    releaser.join(WAIT_S)
    thread.join(WAIT_S)
    assert bench.ended == []


def test_release_waits_for_a_callback_that_is_running_elsewhere() -> None:
    entered, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def on_fail(_: BatonError) -> None:
        entered.set()
        assert go_on.wait(WAIT_S)
        done.set()

    callbacks = ReceiverCallbacks(lambda *_: None, on_fail)
    transfer = IncomingTransfer("t", [], 0, callbacks, store=NumpyKvStore(SMALL, 8), deadline=9.0, clock=lambda: 1.0)
    failer = threading.Thread(target=transfer.fail, args=(BatonError(ErrorKind.CANCELLED, "x"),))
    failer.start()
    assert entered.wait(WAIT_S)
    seen: list[bool] = []
    releaser = threading.Thread(target=lambda: (transfer.release(), seen.append(done.is_set())))
    releaser.start()
    go_on.set()
    releaser.join(WAIT_S)
    failer.join(WAIT_S)
    assert seen == [True]


def test_release_from_the_callback_itself_returns() -> None:
    released: list[bool] = []
    holder: list[IncomingTransfer] = []
    callbacks = ReceiverCallbacks(lambda *_: None, lambda _: released.append(holder[0].release()))
    transfer = IncomingTransfer("t", [], 0, callbacks, store=NumpyKvStore(SMALL, 8), deadline=9.0, clock=lambda: 1.0)
    holder.append(transfer)
    transfer.fail(BatonError(ErrorKind.CANCELLED, "x"))
    assert released == [False]
