"""Frames survive the wire; what the wire may hold besides does not crash anybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.transfer.v1 import transfer_pb2 as pb
from common.errors import BatonError, ErrorKind
from common.kvcache.layout import KvLayout
from common.sampling_params import FinishReason
from kv_transfer import convert, frames
from kv_transfer.pieces import Piece
from kv_transfer.types import ForkToken, Handoff, KvFormat, WorkerIdentity

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
NAME = st.text(max_size=20)
GRANT = st.builds(frames.SlotGrant, U32, U64)
GRANTS = st.lists(GRANT, max_size=3).map(tuple)
PIECE = st.builds(Piece, U32, U32, U32, U32)
REASON = st.none() | st.sampled_from(FinishReason)
FORKS = st.lists(st.builds(ForkToken, NAME, U32, REASON), max_size=3).map(tuple)
HANDOFF = st.builds(Handoff, U32, U32, REASON, FORKS)
MANIFEST = st.builds(frames.Manifest, U32, U64, U64)
LAYOUT = st.builds(KvLayout, U32, U32, U32, U32, NAME)
FORMAT = st.builds(KvFormat, NAME, NAME, LAYOUT)
SENDER_FRAMES = st.one_of(
    st.builds(frames.Hello, st.builds(WorkerIdentity, NAME, NAME), NAME, FORMAT),
    st.builds(frames.OpenTransfer, NAME, st.binary(max_size=16), U64),
    st.builds(frames.RequestSlots, NAME, U64),
    st.builds(frames.SlotWritten, NAME, GRANT, PIECE, U64, U64),
    st.builds(frames.CommitTransfer, NAME, MANIFEST, HANDOFF),
    st.builds(frames.ReturnSlots, NAME, GRANTS),
    st.just(frames.Heartbeat()),
)
RECEIVER_FRAMES = st.one_of(
    st.builds(frames.Welcome, st.binary(max_size=9), NAME, U64, U32, st.integers(0, 9999).map(lambda ms: ms / 1e3)),
    st.builds(frames.GrantSlots, NAME, GRANTS),
    st.builds(frames.SlotLanded, NAME, GRANT, st.booleans()),
    st.builds(frames.Committed, NAME),
    st.just(frames.Heartbeat()),
)


@given(st.lists(SENDER_FRAMES, max_size=4))
def test_sender_frames_survive_the_wire(sent: list[frames.SenderFrame]) -> None:
    wire = pb.ChannelRequest.FromString(convert.sender_frames_to_proto(sent).SerializeToString())
    assert [convert.sender_frame_from_proto(frame) for frame in wire.frames] == sent


@given(st.lists(RECEIVER_FRAMES, max_size=4))
def test_receiver_frames_survive_the_wire(sent: list[frames.ReceiverFrame]) -> None:
    wire = pb.ChannelResponse.FromString(convert.receiver_frames_to_proto(sent).SerializeToString())
    assert [convert.receiver_frame_from_proto(frame) for frame in wire.frames] == sent


@pytest.mark.parametrize("kind", ErrorKind)
def test_errors_of_every_kind_survive_the_wire(kind: ErrorKind) -> None:
    error = BatonError(kind, "what, where", param="x", retry_after_s=1.5)
    (wire,) = convert.sender_frames_to_proto([frames.AbortTransfer("t", error)]).frames
    frame = convert.sender_frame_from_proto(wire)
    assert isinstance(frame, frames.AbortTransfer)
    back = frame.error
    assert (back.kind, back.message, back.param, back.retry_after_s) == (kind, "what, where", "x", 1.5)
    (wire_back,) = convert.receiver_frames_to_proto([frames.TransferEnded("t", error)]).frames
    ended = convert.receiver_frame_from_proto(wire_back)
    assert isinstance(ended, frames.TransferEnded)
    assert ended.error.kind is kind


@given(st.binary(max_size=60))
def test_garbage_is_no_frame_or_a_harmless_one(data: bytes) -> None:
    try:
        message = pb.SenderFrame.FromString(data)
    except Exception:
        return
    convert.sender_frame_from_proto(message)


def test_unknown_kinds_and_reasons_are_not_taken_for_known_ones() -> None:
    assert convert.sender_frame_from_proto(pb.SenderFrame()) is None
    assert convert.receiver_frame_from_proto(pb.ReceiverFrame()) is None
    strange = pb.SenderFrame(commit=pb.CommitTransfer(transfer_id="t"))
    strange.commit.MergeFromString(b"\x38\x63")  # finish_reason = 99
    assert convert.sender_frame_from_proto(strange) is None
    abort = pb.SenderFrame(abort=pb.AbortTransfer(transfer_id="t"))
    abort.abort.error.MergeFromString(b"\x08\x63")  # kind = 99
    frame = convert.sender_frame_from_proto(abort)
    assert isinstance(frame, frames.AbortTransfer)
    assert frame.error.kind is ErrorKind.INTERNAL
