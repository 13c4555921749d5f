"""Counters of the two sides, for metrics. Plain snapshots: reading them needs no lock and costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Dropped(StrEnum):
    """Why a frame was not acted upon."""

    MALFORMED = "malformed"
    UNKNOWN_TRANSFER = "unknown_transfer"  # never reserved, ended, or another channel's
    WRONG_SECRET = "wrong_secret"
    STALE_SLOT = "stale_slot"  # not granted to this channel under this generation
    BAD_PIECE = "bad_piece"  # out of bounds, of the wrong size, or overlapping
    DUPLICATE = "duplicate"
    LATE = "late"  # the transfer has ended


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """ended: transfers by final state. failed: those that did not commit, by ErrorKind. dropped_frames: by Dropped.
    Counts run from the start; open_*, num_channels and slots (by SlotState) are of this moment."""

    ended: Mapping[str, int]
    failed: Mapping[str, int]
    dropped_frames: Mapping[str, int]
    refused_handshakes: int
    pieces_landed: int
    pieces_rejected: int
    bytes_landed: int
    open_transfers: int
    num_channels: int
    slots: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SenderStats:
    """Like ReceiverStats. lanes: by worker_id of the peer, what the transport chose. pieces_resent: after a refusal."""

    ended: Mapping[str, int]
    failed: Mapping[str, int]
    dropped_frames: Mapping[str, int]
    pieces_sent: int
    pieces_resent: int
    bytes_sent: int
    open_transfers: int
    free_staging_slots: int
    lanes: Mapping[str, tuple[str, ...]]
