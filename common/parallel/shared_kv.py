"""The KV of a tensor-parallel group: a part a rank, in one piece of shared memory, and whole to whoever transfers it.

    memory   | rank 0: [layers, blocks, 2, its heads, block_size, head_dim] | rank 1: … | rank 2: … |
    outside  [layers, blocks, 2, all heads, block_size, head_dim]

A rank computes on its own part, contiguous as kernels want it. Rank 0's process, which owns scheduler and transfers,
sees every part: it gathers all heads of a block, and scatters them, so that a transfer's two ends need not know how
many ranks the other has. Heads that several ranks hold are read from the first and written to each.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from common.kvcache.checksum import checksum_of
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.kvcache.layout import KvLayout
from common.kvcache.reshape import BlockPart, Reshape
from common.model.config import ModelConfig
from common.model.shard import Shard

_CPU: Final = torch.device("cpu")


def part_layouts(full: KvLayout, config: ModelConfig, size: int) -> list[KvLayout]:
    """The layout of each rank's part; of no heads where there are more ranks than can share them."""
    shares = [Shard(rank, size).kv_heads(config) for rank in range(size)]
    return [replace(full, num_kv_heads=s.stop - s.start, first_kv_head=s.start) for s in shares]


class SharedMemory:
    """Zeros that processes share by their file descriptor: anonymous, gone with the last of them, taken where touched.

    Raises MemoryError where it can't be had.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        """fd: of another process's SharedMemory, which is taken over; None: new memory."""
        try:
            self.fd = os.memfd_create("baton-kv") if fd is None else fd
            if fd is None:
                os.ftruncate(self.fd, num_bytes)
            mapping = mmap.mmap(self.fd, num_bytes)
        except OSError as error:
            raise MemoryError(f"no shared memory for a KV cache of {num_bytes} bytes: {error.strerror}") from None
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)

    def close(self) -> None:
        """Give the descriptor back; the memory stays while tensors see it."""
        os.close(self.fd)


def pool_bytes(layouts: Sequence[KvLayout], num_blocks: int) -> int:
    """Of the whole shared memory. A layout's part begins behind those before it."""
    return sum(layout.num_layers * layout.block_bytes for layout in layouts) * num_blocks


def part_of(memory: SharedMemory, layouts: Sequence[KvLayout], rank: int, num_blocks: int) -> KvCache:
    """One rank's part of the pool, a view of the shared memory."""
    start, end = pool_bytes(layouts[:rank], num_blocks), pool_bytes(layouts[: rank + 1], num_blocks)
    return KvCache(layouts[rank], num_blocks, _CPU, memory.bytes[start:end])


class SharedKvPool:
    """Implements KvPool for rank 0. Owns the memory with the other ranks, which must not run a step meanwhile that
    touches the blocks in question."""

    def __init__(self, layout: KvLayout, parts: Sequence[KvCache]) -> None:
        """layout: of all heads. parts: each rank's, rank 0's first."""
        self.layout = layout
        self.own = parts[0]
        self.num_blocks = parts[0].num_blocks
        self.device = parts[0].device
        self._parts = [part for part in parts if part.layout.num_kv_heads]

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        return tuple(view for part in self._parts for view in part.words)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for part in self._parts:
            part.copy_blocks(pairs)

    def gather(self, first_layer: int, num_layers: int, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> int:
        """See KvStore. Raises ValueError like KvCache.gather."""
        ids = self._check(first_layer, num_layers, block_ids, out)
        packed = self._as_blocks(out, num_layers)
        for part in reversed(self._parts):  # the first that holds a head has the last word
            held = part.layout
            found = part.data[first_layer : first_layer + num_layers].index_select(1, ids)
            packed[:, :, :, held.first_kv_head : held.end_kv_head] = found
        return checksum_of(out)

    def scatter(self, first_layer: int, num_layers: int, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> int:
        """See KvStore. Raises ValueError like KvCache.gather."""
        ids = self._check(first_layer, num_layers, block_ids, data)
        # torch has no read-only tensors, and warns.
        packed = self._as_blocks(data if data.flags.writeable else data.copy(), num_layers)
        for part in self._parts:
            held = part.layout
            new = packed[:, :, :, held.first_kv_head : held.end_kv_head]
            part.data[first_layer : first_layer + num_layers].index_copy_(1, ids, new)
        return checksum_of(data)

    def scatter_parts(
        self,
        first_layer: int,
        num_layers: int,
        block_ids: Sequence[int],
        data: npt.NDArray[np.uint8],
        parts: Sequence[BlockPart],
        reshape: Reshape,
    ) -> int:
        """See KvStore. Raises ValueError like KvCache.scatter_parts."""
        if reshape.local != self.layout:
            raise ValueError(f"{reshape.local} is not {self.layout}")
        for part in self._parts:
            own = replace(reshape, local=part.layout)
            part.scatter_parts(first_layer, num_layers, block_ids, data, parts, own)
        return checksum_of(data)

    def _check(
        self, first_layer: int, num_layers: int, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]
    ) -> torch.Tensor:
        """block_ids as int64 [n]."""
        ids = torch.tensor(list(block_ids), dtype=torch.int64)
        if not 0 <= first_layer <= first_layer + num_layers <= self.layout.num_layers:
            raise ValueError(f"layers [{first_layer}, {first_layer + num_layers}) of {self.layout.num_layers}")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.num_blocks):
            raise ValueError(f"block ids {int(ids.min())}..{int(ids.max())} of {self.num_blocks} blocks")
        wanted = num_layers * len(ids) * self.layout.block_bytes
        if buffer.nbytes != wanted or not buffer.flags.c_contiguous:
            raise ValueError(f"buffer of {buffer.nbytes} bytes for {wanted}, or not contiguous")
        return ids

    def _as_blocks(self, buffer: npt.NDArray[np.uint8], num_layers: int) -> torch.Tensor:
        """[num_layers, n, 2, all heads, block_size, head_dim], a view."""
        layout = self.layout
        packed = torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)
        num_blocks = buffer.nbytes // (num_layers * layout.block_bytes) if buffer.nbytes else 0
        shape = (num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        return packed.view(TORCH_DTYPES[layout.dtype]).view(shape)
