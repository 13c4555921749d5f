"""Between the side of the network that is asked for cached blocks, and the engine that holds them."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.engine_thread import Inbox
from common.engine.messages import LendCommand
from common.errors import BatonError
from common.rpc.worker_messages import WorkerIdentity
from common.worker.info import WorkerInfo
from kv_transfer.lender import Lender
from kv_transfer.types import PullRequest


def make_lender(info: WorkerInfo, inbox: Inbox) -> Lender:
    """Its engine must have been told who sends (SequenceScheduler.lend_by)."""

    def lend(request: PullRequest, answer: Callable[[int | BatonError], None]) -> None:
        inbox.put(LendCommand(request.transfer_id, request.block_hashes, request.target, request.deadline, answer))

    return Lender(WorkerIdentity(info.worker_id, info.epoch), info.pull_secret, info.block_size, lend)
