"""One transfer at the sender: what was pushed, cut, gathered, put, landed. For one event loop; no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from common.errors import BatonError
from common.telemetry import get_logger
from kv_transfer.frames import Manifest, SlotGrant
from kv_transfer.pieces import Piece, PieceCutter, PieceGeometry
from kv_transfer.state import OUTGOING_MOVES, OutgoingState, is_final
from kv_transfer.types import Handoff, SenderCallbacks, TransferStats, TransferTarget

log = get_logger(__name__)


class JobPhase(Enum):
    GATHERING = "gathering"  # its blocks are being read
    PUTTING = "putting"  # the transport reads its staging slot, the landing slot is being written
    WRITTEN = "written"  # the peer verifies
    REFUSED = "refused"  # waits for another grant
    ACCEPTED = "accepted"  # verified by the peer: the job is over


@dataclass(slots=True, eq=False)
class PieceJob:
    """A piece on its way. staging_slot: its bytes, from gathering to the end of the job; None: they are gathered
    into the granted slot itself."""

    transfer: Outgoing
    piece: Piece
    num_bytes: int
    staging_slot: int | None
    grant: SlotGrant
    phase: JobPhase = JobPhase.GATHERING
    checksum: int = 0
    num_puts: int = 0

    @property
    def needs_blocks(self) -> bool:
        """Its bytes are nowhere else yet, or not known to be whole there."""
        if self.staging_slot is None:
            return self.phase is not JobPhase.ACCEPTED
        return self.phase is JobPhase.GATHERING


@dataclass(slots=True, eq=False)
class Outgoing:
    """deadline: monotonic seconds. awaited_grants: asked for, not yet here. gathering: pieces in the order they were
    cut, from the oldest whose gather has not ended. gathers_running: while > 0 the end is not told."""

    transfer_id: str
    target: TransferTarget
    expected_num_blocks: int
    callbacks: SenderCallbacks
    deadline: float
    state: OutgoingState = OutgoingState.OPENING
    block_ids: list[int] = field(default_factory=list)
    cutter: PieceCutter | None = None
    grants: deque[SlotGrant] = field(default_factory=deque)
    awaited_grants: int = 0
    requested_total: int = 0
    jobs: dict[SlotGrant, PieceJob] = field(default_factory=dict)
    refused: deque[PieceJob] = field(default_factory=deque)
    gathering: deque[PieceJob] = field(default_factory=deque)
    gathers_running: int = 0
    manifest: Manifest = field(default_factory=Manifest)
    handoff: Handoff | None = None
    started_at: float | None = None
    bytes_put: int = 0
    result: TransferStats | BatonError | None = None

    @property
    def is_ended(self) -> bool:
        return is_final(self.state)

    def move(self, state: OutgoingState) -> bool:
        """False: not a legal move, nothing changed."""
        if state not in OUTGOING_MOVES[self.state]:
            return False
        self.state = state
        return True

    def start_cutting(self, geometry: PieceGeometry) -> None:
        self.cutter = PieceCutter(geometry)
        self.cutter.add(len(self.block_ids))

    def add_blocks(self, block_ids: tuple[int, ...]) -> None:
        self.block_ids.extend(block_ids)
        if self.cutter is not None:
            self.cutter.add(len(block_ids))

    @property
    def num_uncut(self) -> int:
        """Pieces that could be gathered now."""
        return self.cutter.num_left() if self.cutter is not None else 0

    @property
    def missing_requests(self) -> int:
        """Grants to ask for, beyond those at hand and those awaited."""
        return max(0, self.num_uncut + len(self.refused) - len(self.grants) - self.awaited_grants)

    @property
    def all_written(self) -> bool:
        """Everything was pushed, and every piece has been put and told at least once."""
        under_way = any(job.num_puts == 0 or job.phase is JobPhase.GATHERING for job in self.jobs.values())
        return self.handoff is not None and self.num_uncut == 0 and not under_way

    def ids_of(self, piece: Piece) -> list[int]:
        return self.block_ids[piece.first_block : piece.first_block + piece.num_blocks]

    def tell_gathered(self, num_layers: int) -> None:
        """Report the blocks that are gathered in all layers, if there are more than last time."""
        done = 0
        while self.gathering and not self.gathering[0].needs_blocks:
            piece = self.gathering.popleft().piece
            if piece.first_layer + piece.num_layers == num_layers:
                done = piece.first_block + piece.num_blocks
        if done and not self.is_ended:
            self._call(lambda: self.callbacks.on_gathered(done))

    def tell_end(self) -> None:
        """Report the result, once, when nothing reads the blocks any more."""
        result = self.result
        if result is None or self.gathers_running:
            return
        self.result = None
        self._call(lambda: self.callbacks.on_end(result))

    def stats(self, now: float) -> TransferStats:
        return TransferStats(now - (now if self.started_at is None else self.started_at), self.bytes_put, now)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            log.exception("a transfer's callback failed", transfer_id=self.transfer_id)
