"""The host tier's bytes: one slab outside of the KV pool, a slot of it as large as one block over all layers.

    slots  [num_slots, num_layers, words of a block]        a slot is contiguous: one strided copy moves a block
    pool   [num_layers, num_blocks, words of a block]       of a tensor-parallel group, one of both a rank

On a CPU the slab is plain memory that is untouched until used; for a GPU's pool it is pinned, so that copies are DMA on
the stream that steps run on, ordered with them, and no thread waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.device import host_memory
from common.kvcache.interface import KvPool


class HostArena:
    """Implements BlockCopier for `kv_cache`, which it borrows. Owns the slab for life.

    Raises ValueError if num_slots < 1, MemoryError where the memory can't be had.
    """

    def __init__(self, kv_cache: KvPool, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"no host memory of {num_slots} slots")
        self._parts = [(_slots_for(pool, num_slots), pool.transpose(0, 1)) for pool in kv_cache.words]

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            for part, blocks in self._parts:
                part[slot].copy_(blocks[block_id], non_blocking=True)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot, block_id in zip(slots, block_ids, strict=True):
            for part, blocks in self._parts:
                blocks[block_id].copy_(part[slot], non_blocking=True)


def _slots_for(pool: torch.Tensor, num_slots: int) -> torch.Tensor:
    num_layers, _, num_words = pool.shape
    slab = host_memory(num_slots * num_layers * num_words * pool.element_size(), pool.device)
    return slab.view(pool.dtype).view(num_slots, num_layers, num_words)
