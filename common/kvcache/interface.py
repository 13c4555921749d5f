"""What a worker's engine and its transfers need of the paged KV, whether one process holds it or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvStore


class KvPool(KvStore, Protocol):
    """`num_blocks` blocks of `layout`, which is that of all KV heads."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def own(self) -> KvCache:
        """The part that this process computes on: all of it, or the heads of one tensor-parallel rank."""
        ...

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        """All bytes, whatever the dtype: views [num_layers, num_blocks, words of a block], one a part."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The content of each pair's first block, over all layers, into its second. No block is in both places."""
        ...
