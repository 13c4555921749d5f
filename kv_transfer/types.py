"""What the two services exchange with this library. No I/O here.

Ownership. The sequence that a transfer belongs to owns its blocks and frees them; the library only copies out of
(sender) or into (receiver) them, inside the windows stated at `OutgoingTransfer` and `KvReceiver`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import BatonError
from common.kvcache.layout import KvLayout
from common.rpc.worker_messages import TransferTarget as TransferTarget
from common.rpc.worker_messages import WorkerIdentity as WorkerIdentity
from common.sampling_params import FinishReason


@dataclass(frozen=True, slots=True)
class KvFormat:
    """What both sides tell each other in the handshake, and mostly must agree on."""

    model_fingerprint: str
    layout_name: str
    layout: KvLayout

    def mismatch(self, other: KvFormat) -> str | None:
        """Why KV of `other` can't be taken over here: one line naming the field and both values; None where it can.

        Blocks may have another size, and hold more heads than are kept here (kvcache/reshape.py)."""
        mine, theirs = self._fields(), other._fields()
        differing = next((f"{k}: {mine[k]!r} here, {theirs[k]!r} there" for k in mine if mine[k] != theirs[k]), None)
        return differing or self._uncovered_heads(other.layout)

    def _fields(self) -> dict[str, object]:
        own = {name: getattr(self.layout, name) for name in ("num_layers", "head_dim", "dtype")}
        return {"model_fingerprint": self.model_fingerprint, "layout": self.layout_name, **own}

    def _uncovered_heads(self, theirs: KvLayout) -> str | None:
        mine = self.layout
        if theirs.block_size < 1:
            return f"block_size: {mine.block_size} here, {theirs.block_size} there"
        if theirs.first_kv_head <= mine.first_kv_head and mine.end_kv_head <= theirs.end_kv_head:
            return None
        return f"KV heads: {_heads(mine)} here, {_heads(theirs)} there: one sender must hold all that are kept here"


def _heads(layout: KvLayout) -> str:
    rank = f"rank {layout.tp_rank} of {layout.tp_size}"
    return f"{layout.first_kv_head} to {layout.end_kv_head - 1} ({rank})"


@dataclass(frozen=True, slots=True)
class ForkToken:
    """The first token of another continuation of the same KV; finish_reason: set if it already ended it."""

    transfer_id: str
    first_token_id: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Handoff:
    """The sampler's state, closing a transfer.

    num_computed_tokens: tokens whose KV the receiver holds after commit. finish_reason: set if the first token
    already ended the request; then the blocks only enter the cache. forks: one for each fork of the sequence.
    """

    num_computed_tokens: int
    first_token_id: int
    finish_reason: FinishReason | None = None
    forks: tuple[ForkToken, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferStats:
    """seconds: first piece to commit; num_bytes: payload put, resends included. ended_at: when it was committed,
    monotonic seconds of this process."""

    seconds: float
    num_bytes: int
    ended_at: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Cached blocks that another worker wants sent. deadline: monotonic seconds of this process."""

    transfer_id: str
    block_hashes: tuple[bytes, ...]
    target: TransferTarget
    deadline: float


class OutgoingTransfer(Protocol):
    """One sequence's KV on its way out. All methods are thread-safe, return at once, and are no-ops after the end.

    `on_gathered(n)`: the first n of the pushed blocks were copied out: the library will not read them again.
    `on_end(stats | error)`: exactly once, last; nothing is read after it. Both run in the library's threads or on
    its event loop: hand over to your own.
    """

    def push(self, block_ids: Sequence[int]) -> None:
        """The next blocks of the sequence, in order, whose KV is final. They must stay valid until gathered."""

    def commit(self, handoff: Handoff) -> None:
        """No more blocks follow. Ends with stats once the receiver verified everything."""

    def abort(self) -> None:
        """Give up; ends with ErrorKind.CANCELLED. A gather under way is waited for (≤ one piece), then none follows."""


@dataclass(frozen=True, slots=True)
class SenderCallbacks:
    on_gathered: Callable[[int], None]
    on_end: Callable[[TransferStats | BatonError], None]


@dataclass(frozen=True, slots=True)
class ReceiverCallbacks:
    """Called at most once each, and only one of the two: verified and closed, or failed. In the library's threads."""

    on_commit: Callable[[Handoff, TransferStats], None]
    on_fail: Callable[[BatonError], None]
