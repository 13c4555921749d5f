"""Protobuf ↔ frames. Nothing else in kv_transfer knows the generated message classes' fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.common.v1 import common_pb2
from baton.transfer.v1 import transfer_pb2 as pb
from common.kvcache.layout import KvLayout
from common.rpc.convert import (
    error_from_proto,
    error_to_proto,
    finish_reason_from_proto,
    finish_reason_to_proto,
)
from kv_transfer.frames import (
    AbortTransfer,
    Committed,
    CommitTransfer,
    GrantSlots,
    Heartbeat,
    Hello,
    Manifest,
    OpenTransfer,
    ReceiverFrame,
    RequestSlots,
    ReturnSlots,
    SenderFrame,
    SlotGrant,
    SlotLanded,
    SlotWritten,
    TransferEnded,
    Welcome,
)
from kv_transfer.pieces import Piece
from kv_transfer.types import ForkToken, Handoff, KvFormat, WorkerIdentity


def sender_frames_to_proto(frames: Iterable[SenderFrame]) -> pb.ChannelRequest:
    return pb.ChannelRequest(frames=[_sender_frame_to_proto(frame) for frame in frames])


def receiver_frames_to_proto(frames: Iterable[ReceiverFrame]) -> pb.ChannelResponse:
    return pb.ChannelResponse(frames=[_receiver_frame_to_proto(frame) for frame in frames])


def sender_frame_from_proto(message: pb.SenderFrame) -> SenderFrame | None:
    """None for a frame of a kind that this version does not know."""
    match message.WhichOneof("frame"):
        case "written":
            return _written_from_proto(message.written)
        case "request_slots":
            return RequestSlots(message.request_slots.transfer_id, message.request_slots.total_slots)
        case "returned":
            return ReturnSlots(message.returned.transfer_id, _grants_from_proto(message.returned.grants))
        case "commit":
            return _commit_from_proto(message.commit)
        case "open":
            return OpenTransfer(message.open.transfer_id, message.open.secret, message.open.expected_bytes)
        case "abort":
            return AbortTransfer(message.abort.transfer_id, error_from_proto(message.abort.error))
        case "hello":
            worker = WorkerIdentity(message.hello.worker_id, message.hello.epoch)
            hello = message.hello
            fmt = _format_from_proto(hello.format)
            return Hello(worker, hello.peer_epoch, fmt, hello.transfer_id, hello.secret)
        case "heartbeat":
            return Heartbeat()
        case _:
            return None


def receiver_frame_from_proto(message: pb.ReceiverFrame) -> ReceiverFrame | None:
    """None for a frame of a kind that this version does not know."""
    match message.WhichOneof("frame"):
        case "landed":
            landed = message.landed
            return SlotLanded(landed.transfer_id, SlotGrant(landed.slot, landed.generation), landed.accepted)
        case "grant":
            return GrantSlots(message.grant.transfer_id, _grants_from_proto(message.grant.grants))
        case "committed":
            return Committed(message.committed.transfer_id)
        case "ended":
            return TransferEnded(message.ended.transfer_id, error_from_proto(message.ended.error))
        case "heartbeat":
            return Heartbeat()
        case "welcome":
            w = message.welcome
            where = (w.transport_descriptor, w.transport, w.slot_bytes, w.num_slots)
            return Welcome(*where, w.lease_ms / 1e3, w.shared_ring, w.control_line)
        case _:
            return None


def _sender_frame_to_proto(frame: SenderFrame) -> pb.SenderFrame:
    match frame:
        case SlotWritten():
            return pb.SenderFrame(written=_written_to_proto(frame))
        case RequestSlots(transfer_id, total_slots):
            return pb.SenderFrame(request_slots=pb.RequestSlots(transfer_id=transfer_id, total_slots=total_slots))
        case ReturnSlots(transfer_id, grants):
            return pb.SenderFrame(returned=pb.ReturnSlots(transfer_id=transfer_id, grants=_grants_to_proto(grants)))
        case CommitTransfer():
            return pb.SenderFrame(commit=_commit_to_proto(frame))
        case OpenTransfer(transfer_id, secret, expected_bytes):
            opened = pb.OpenTransfer(transfer_id=transfer_id, secret=secret, expected_bytes=expected_bytes)
            return pb.SenderFrame(open=opened)
        case AbortTransfer(transfer_id, error):
            return pb.SenderFrame(abort=pb.AbortTransfer(transfer_id=transfer_id, error=error_to_proto(error)))
        case Hello():
            return pb.SenderFrame(hello=_hello_to_proto(frame))
        case Heartbeat():
            return pb.SenderFrame(heartbeat=pb.Heartbeat())


def _receiver_frame_to_proto(frame: ReceiverFrame) -> pb.ReceiverFrame:
    match frame:
        case SlotLanded(transfer_id, grant, accepted):
            landed = pb.SlotLanded(
                transfer_id=transfer_id, slot=grant.slot, generation=grant.generation, accepted=accepted
            )
            return pb.ReceiverFrame(landed=landed)
        case GrantSlots(transfer_id, grants):
            return pb.ReceiverFrame(grant=pb.GrantSlots(transfer_id=transfer_id, grants=_grants_to_proto(grants)))
        case Committed(transfer_id):
            return pb.ReceiverFrame(committed=pb.Committed(transfer_id=transfer_id))
        case TransferEnded(transfer_id, error):
            return pb.ReceiverFrame(ended=pb.TransferEnded(transfer_id=transfer_id, error=error_to_proto(error)))
        case Heartbeat():
            return pb.ReceiverFrame(heartbeat=pb.Heartbeat())
        case Welcome():
            welcome = pb.Welcome(
                transport_descriptor=frame.descriptor,
                transport=frame.transport,
                slot_bytes=frame.slot_bytes,
                num_slots=frame.num_slots,
                lease_ms=round(frame.lease_s * 1e3),
                shared_ring=frame.shared_ring,
                control_line=frame.control_line,
            )
            return pb.ReceiverFrame(welcome=welcome)


def _grants_to_proto(grants: Sequence[SlotGrant]) -> list[pb.SlotGrant]:
    return [pb.SlotGrant(slot=grant.slot, generation=grant.generation) for grant in grants]


def _grants_from_proto(grants: Iterable[pb.SlotGrant]) -> tuple[SlotGrant, ...]:
    return tuple(SlotGrant(grant.slot, grant.generation) for grant in grants)


def _written_to_proto(frame: SlotWritten) -> pb.SlotWritten:
    piece = frame.piece
    return pb.SlotWritten(
        transfer_id=frame.transfer_id,
        slot=frame.grant.slot,
        generation=frame.grant.generation,
        piece=pb.Piece(
            first_layer=piece.first_layer,
            num_layers=piece.num_layers,
            first_block=piece.first_block,
            num_blocks=piece.num_blocks,
        ),
        num_bytes=frame.num_bytes,
        checksum=frame.checksum,
    )


def _written_from_proto(message: pb.SlotWritten) -> SlotWritten:
    p = message.piece
    return SlotWritten(
        message.transfer_id,
        SlotGrant(message.slot, message.generation),
        Piece(p.first_layer, p.num_layers, p.first_block, p.num_blocks),
        message.num_bytes,
        message.checksum,
    )


def _commit_to_proto(frame: CommitTransfer) -> pb.CommitTransfer:
    manifest, handoff = frame.manifest, frame.handoff
    return pb.CommitTransfer(
        transfer_id=frame.transfer_id,
        num_pieces=manifest.num_pieces,
        num_bytes=manifest.num_bytes,
        checksum_sum=manifest.checksum_sum,
        num_computed_tokens=handoff.num_computed_tokens,
        first_token_id=handoff.first_token_id,
        finish_reason=finish_reason_to_proto(handoff.finish_reason),
        forks=[
            pb.ForkToken(
                transfer_id=fork.transfer_id,
                first_token_id=fork.first_token_id,
                finish_reason=finish_reason_to_proto(fork.finish_reason),
            )
            for fork in handoff.forks
        ],
    )


def _commit_from_proto(message: pb.CommitTransfer) -> CommitTransfer | None:
    """None for a finish reason that this version does not know: to go on decoding would be wrong."""
    reasons = [message.finish_reason, *(fork.finish_reason for fork in message.forks)]
    if not set(reasons) <= set(common_pb2.FinishReason.values()):
        return None
    reason = finish_reason_from_proto(message.finish_reason)
    forks = tuple(
        ForkToken(fork.transfer_id, fork.first_token_id, finish_reason_from_proto(fork.finish_reason))
        for fork in message.forks
    )
    manifest = Manifest(message.num_pieces, message.num_bytes, message.checksum_sum)
    handoff = Handoff(message.num_computed_tokens, message.first_token_id, reason, forks)
    return CommitTransfer(message.transfer_id, manifest, handoff)


def _hello_to_proto(frame: Hello) -> pb.Hello:
    fmt, layout = frame.format, frame.format.layout
    return pb.Hello(
        worker_id=frame.worker.worker_id,
        epoch=frame.worker.epoch,
        peer_epoch=frame.peer_epoch,
        format=pb.KvFormat(
            model_fingerprint=fmt.model_fingerprint,
            dtype=layout.dtype,
            layout=fmt.layout_name,
            block_size=layout.block_size,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            first_kv_head=layout.first_kv_head,
            tp_rank=layout.tp_rank,
            tp_size=layout.tp_size,
        ),
        transfer_id=frame.transfer_id,
        secret=frame.secret,
    )


def _format_from_proto(message: pb.KvFormat) -> KvFormat:
    layout = KvLayout(
        num_layers=message.num_layers,
        block_size=message.block_size,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        first_kv_head=message.first_kv_head,
        tp_rank=message.tp_rank,
        tp_size=message.tp_size,
    )
    return KvFormat(message.model_fingerprint, message.layout, layout)
