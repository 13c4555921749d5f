"""The collectives of one tensor-parallel group, over torch.distributed: gloo between processes on CPUs.

A group of its own rather than torch's default one: that is global state of the process. Ranks meet by a file, and gloo
binds to loopback: all ranks of a group are processes of one machine.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore

from common.model.shard import Shard

# A rank that died is noticed by its socket; this bounds what no socket tells.
COLLECTIVE_TIMEOUT_S: Final = 30.0
_LOOPBACK: Final = "127.0.0.1"


class Communicator:
    """One rank's end. Every rank makes the same calls in the same order; each blocks until the others have made it.

    Raises RuntimeError, here and in every call, where another rank is gone or does not come in COLLECTIVE_TIMEOUT_S.
    """

    def __init__(self, shard: Shard, rendezvous: Path) -> None:
        """rendezvous: a file in a folder that only this user may enter; the first rank to come makes it."""
        self.shard = shard
        store = FileStore(str(rendezvous), shard.size)
        store.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._group = _gloo(store, shard)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x added up, the same bits on each. x is the caller's no longer."""
        # Summed in float32: bfloat16 would round after each rank.
        wide = x.float()
        self._group.allreduce([wide], distributed.ReduceOp.SUM).wait()
        return wide.to(x.dtype)

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """On rank 0 the ranks' x [R, own share of num_columns] side by side, float32 [R, num_columns]; elsewhere empty,
        [0, num_columns]."""
        size = self.shard.size
        widths = [share.stop - share.start for share in (Shard(r, size).of(num_columns) for r in range(size))]
        nothing = x.new_empty(0, num_columns)
        if not len(x):
            return nothing
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1]))
        pieces = [torch.empty_like(padded) for _ in widths] if self.shard.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._group.gather([pieces] if pieces else [], [padded], options).wait()
        if not pieces:
            return nothing
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], dim=1)


def _gloo(store: Any, shard: Shard) -> Any:
    gloo: Any = distributed.ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    options._threads = 1
    return gloo(store, shard.rank, shard.size, options)
