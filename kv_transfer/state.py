"""The life of a transfer on either side, as tables of legal moves. A move that is not in the table is not made: the
event that asked for it came late, and is counted and dropped by its caller.

    receiver   RESERVED ──► RECEIVING ──► COMMITTED           sender   OPENING ──► SENDING ──► COMMITTING ──► DONE
                  │             │                                         │           │            │
                  └──────┬──────┘                                         └───────────┼────────────┘
                         ▼                                                            ▼
                 ABORTED | EXPIRED                                           FAILED | ABORTED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class IncomingState(StrEnum):
    RESERVED = "reserved"  # blocks are set aside; nobody has opened the transfer
    RECEIVING = "receiving"  # opened with the right secret; pieces may be written
    COMMITTED = "committed"  # all verified and in place; the blocks are the sequence's again
    ABORTED = "aborted"  # given up by either side, or corrupt
    EXPIRED = "expired"  # lease or deadline ran out


class OutgoingState(StrEnum):
    OPENING = "opening"  # waiting for the channel
    SENDING = "sending"  # OpenTransfer is sent
    COMMITTING = "committing"  # the manifest is sent; only refused pieces are sent again
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


INCOMING_MOVES: Final[Mapping[IncomingState, frozenset[IncomingState]]] = {
    IncomingState.RESERVED: frozenset({IncomingState.RECEIVING, IncomingState.ABORTED, IncomingState.EXPIRED}),
    IncomingState.RECEIVING: frozenset({IncomingState.COMMITTED, IncomingState.ABORTED, IncomingState.EXPIRED}),
    IncomingState.COMMITTED: frozenset(),
    IncomingState.ABORTED: frozenset(),
    IncomingState.EXPIRED: frozenset(),
}

OUTGOING_MOVES: Final[Mapping[OutgoingState, frozenset[OutgoingState]]] = {
    OutgoingState.OPENING: frozenset({OutgoingState.SENDING, OutgoingState.FAILED, OutgoingState.ABORTED}),
    OutgoingState.SENDING: frozenset({OutgoingState.COMMITTING, OutgoingState.FAILED, OutgoingState.ABORTED}),
    OutgoingState.COMMITTING: frozenset({OutgoingState.DONE, OutgoingState.FAILED, OutgoingState.ABORTED}),
    OutgoingState.DONE: frozenset(),
    OutgoingState.FAILED: frozenset(),
    OutgoingState.ABORTED: frozenset(),
}


def is_final(state: IncomingState | OutgoingState) -> bool:
    """No move leads out of `state`."""
    return not (INCOMING_MOVES[state] if isinstance(state, IncomingState) else OUTGOING_MOVES[state])
