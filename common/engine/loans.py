"""Cached blocks that another worker is sent: looked up, pinned, sent, and let go of when nothing reads them any more.

    PullRequest ──► lend: match in the prefix cache ──► pinned, transfer opened, pushed, committed ──► ended: released
                         nothing there, too much lent: refused, and nothing is pinned

Each loan is bounded by its own deadline and by the transfer channel's lease. Engine state: the engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol

from common.engine.messages import LendCommand, LoanEnded
from common.errors import BatonError, ErrorKind
from common.kvcache.block_pool import BlockPool
from common.kvcache.prefix_cache import PrefixCache
from common.rpc.worker_messages import TransferTarget
from kv_transfer.types import Handoff, OutgoingTransfer, SenderCallbacks, TransferStats

MAX_LOANS: Final = 32
# Pinned blocks can't be evicted: what the worker's own sequences need must not wait for its neighbours.
MAX_SHARE: Final = 4


class TransferOpener(Protocol):
    """KvSender, as far as an engine sees it. Thread-safe; returns at once; raises BatonError to refuse."""

    def open(
        self,
        transfer_id: str,
        target: TransferTarget,
        expected_num_blocks: int,
        callbacks: SenderCallbacks,
        timeout_s: float,
    ) -> OutgoingTransfer: ...


@dataclass(frozen=True, slots=True)
class _Loan:
    block_ids: list[int]
    transfer: OutgoingTransfer


class Loans:
    """sender: None: nothing is lent. post: hands a transfer's end, which comes on a foreign thread, to the inbox."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, block_size: int) -> None:
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._sender: TransferOpener | None = None
        self._post: Callable[[LoanEnded], None] = _nobody_listens
        self._loans: dict[str, _Loan] = {}

    def attach(self, sender: TransferOpener, post: Callable[[LoanEnded], None]) -> None:
        """From now on there is somebody who can send."""
        self._sender, self._post = sender, post

    def __len__(self) -> int:
        return len(self._loans)

    def pinned_block_ids(self) -> Iterable[int]:
        return (block_id for loan in self._loans.values() for block_id in loan.block_ids)

    def lend(self, command: LendCommand, now: float) -> None:
        """Answers the command exactly once: with the number of leading blocks that are on their way, or why none is."""
        try:
            command.answer(self._lend(command, now))
        except BatonError as error:
            command.answer(error)

    def end(self, event: LoanEnded) -> bool:
        """Nothing reads the blocks any more. False: no such loan."""
        loan = self._loans.pop(event.transfer_id, None)
        if loan is not None:
            self._pool.release(loan.block_ids)
        return loan is not None

    def abort_all(self) -> None:
        """Their ends follow as LoanEnded."""
        for loan in self._loans.values():
            loan.transfer.abort()

    def _lend(self, command: LendCommand, now: float) -> int:
        if self._sender is None or len(self._loans) >= MAX_LOANS:
            raise BatonError(ErrorKind.OVERLOADED, f"{len(self._loans)} pulls are served already")
        if command.transfer_id in self._loans:
            raise BatonError(ErrorKind.INTERNAL, f"pull {command.transfer_id} is served already")
        room = self._pool.num_blocks // MAX_SHARE - sum(1 for _ in self.pinned_block_ids())
        block_ids = self._take(command.block_hashes[: max(0, room)])
        if not block_ids:
            raise BatonError(ErrorKind.LEASE_LOST, "the prefix is not here any more, or too much of the pool is lent")
        try:
            transfer = self._open(self._sender, command, len(block_ids), now)
        except BatonError:
            self._pool.release(block_ids)
            raise
        self._loans[command.transfer_id] = _Loan(block_ids, transfer)
        transfer.push(block_ids)
        num_tokens = command.target.num_cached_tokens + len(block_ids) * self._block_size
        transfer.commit(Handoff(num_tokens, 0))
        return len(block_ids)

    def _take(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest leading run that is cached, one reference each. What only the host tier has comes back into the
        pool, unless blocks are scarce."""
        known = list(takewhile(self._is_cached, hashes))
        taken = self._cache.allocate(known, len(known), keep_free=self._pool.num_blocks // MAX_SHARE) if known else None
        if taken is None:
            return self._cache.match(hashes)
        self._pool.release(taken.block_ids[taken.num_cached :])
        return taken.block_ids[: taken.num_cached]

    def _is_cached(self, block_hash: bytes) -> bool:
        host = self._cache.host
        return self._cache.block_of(block_hash) is not None or (host is not None and block_hash in host)

    def _open(self, sender: TransferOpener, command: LendCommand, num_blocks: int, now: float) -> OutgoingTransfer:
        transfer_id, post = command.transfer_id, self._post

        def on_end(_: TransferStats | BatonError) -> None:
            post(LoanEnded(transfer_id))

        callbacks = SenderCallbacks(on_gathered=_ignore, on_end=on_end)
        return sender.open(transfer_id, command.target, num_blocks, callbacks, command.deadline - now)


def _ignore(_: int) -> None:
    """Blocks stay pinned until the transfer's end, which follows its last gathering closely."""


def _nobody_listens(_: LoanEnded) -> None:
    """Without a sender there are no loans."""
