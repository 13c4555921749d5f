"""The states of a request, and the only moves between them.

QUEUED ──► RESERVING ──► PREFILLING ──► DECODING ──► FINISHED
  ▲             │              │            │
  └─────────────┴──── retry ───┴────────────┘        from anywhere before the end: FAILED, ABORTED
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class RequestState(StrEnum):
    """QUEUED: waits for a placement. RESERVING: the decode worker is asked for blocks. PREFILLING: no token yet in this
    attempt. DECODING: tokens flow.
    """

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


_S = RequestState
TERMINAL: Final = frozenset({_S.FINISHED, _S.FAILED, _S.ABORTED})
# FINISHED is legal from everywhere: a stop string may be found while an attempt is being repeated.
LEGAL_MOVES: Final[dict[RequestState, frozenset[RequestState]]] = {
    _S.QUEUED: TERMINAL | {_S.RESERVING, _S.PREFILLING},
    _S.RESERVING: TERMINAL | {_S.QUEUED, _S.PREFILLING},
    _S.PREFILLING: TERMINAL | {_S.QUEUED, _S.DECODING},
    _S.DECODING: TERMINAL | {_S.QUEUED},
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.ABORTED: frozenset(),
}
# As the gauges count them: waiting until a worker computes.
WAITING: Final = frozenset({_S.QUEUED, _S.RESERVING})
RUNNING: Final = frozenset({_S.PREFILLING, _S.DECODING})


class IllegalMoveError(RuntimeError):
    """A bug in the router."""


def check_move(old: RequestState, new: RequestState) -> RequestState:
    """Returns `new`. Raises IllegalMoveError unless the table has the move."""
    if new not in LEGAL_MOVES[old]:
        raise IllegalMoveError(f"request can't go from {old} to {new}")
    return new
