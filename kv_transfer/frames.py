"""The frames of baton.transfer.v1 as dataclasses; convert.py maps them. Order and meaning: README.md."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import BatonError
from kv_transfer.pieces import Piece
from kv_transfer.types import Handoff, KvFormat, WorkerIdentity


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """The right to write `slot` once. generation: unique to this grant of this slot."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the receiver must hold at commit. checksum_sum: of the pieces' checksums, modulo 2^64."""

    num_pieces: int = 0
    num_bytes: int = 0
    checksum_sum: int = 0

    def plus(self, num_bytes: int, checksum: int) -> Manifest:
        total = (self.checksum_sum + checksum) & 0xFFFF_FFFF_FFFF_FFFF
        return Manifest(self.num_pieces + 1, self.num_bytes + num_bytes, total)


# Sender to receiver.


@dataclass(frozen=True, slots=True)
class Hello:
    """peer_epoch: the receiver's incarnation that the sender means. transfer_id, secret: of a reservation that the
    receiver made, the proof that a router sent this sender; format: of its KV."""

    worker: WorkerIdentity
    peer_epoch: str
    format: KvFormat
    transfer_id: str
    secret: bytes


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    transfer_id: str
    secret: bytes
    expected_bytes: int


@dataclass(frozen=True, slots=True)
class RequestSlots:
    """total_slots: wanted since OpenTransfer, in all."""

    transfer_id: str
    total_slots: int


@dataclass(frozen=True, slots=True)
class SlotWritten:
    transfer_id: str
    grant: SlotGrant
    piece: Piece
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    transfer_id: str
    manifest: Manifest
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    transfer_id: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class ReturnSlots:
    transfer_id: str
    grants: tuple[SlotGrant, ...]


# Both ways.


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


# Receiver to sender.


@dataclass(frozen=True, slots=True)
class Welcome:
    """descriptor: for the transport's connect. shared_ring: for open_shared, control_line: for connect_line; empty:
    not offered."""

    descriptor: bytes
    transport: str
    slot_bytes: int
    num_slots: int
    lease_s: float
    shared_ring: bytes = b""
    control_line: bytes = b""


@dataclass(frozen=True, slots=True)
class GrantSlots:
    transfer_id: str
    grants: tuple[SlotGrant, ...]


@dataclass(frozen=True, slots=True)
class SlotLanded:
    transfer_id: str
    grant: SlotGrant
    accepted: bool


@dataclass(frozen=True, slots=True)
class Committed:
    transfer_id: str


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The receiver takes nothing more of this transfer."""

    transfer_id: str
    error: BatonError


SenderFrame = (
    Hello | OpenTransfer | RequestSlots | SlotWritten | CommitTransfer | AbortTransfer | ReturnSlots | Heartbeat
)
ReceiverFrame = Welcome | GrantSlots | SlotLanded | Committed | TransferEnded | Heartbeat
