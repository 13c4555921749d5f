"""The paged KV cache: one preallocated tensor for all layers, and the copies that transfer makes out of and into it.

    data  [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]
    gathered bytes: for each layer, for each block of block_ids, that block's [2, num_kv_heads, block_size, head_dim]

Who may use a block, and when, is the block pool's business; this file only holds the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from common.device import gather_words, native_copies, scatter_words, zeroed_memory
from common.kvcache.checksum import checksum_of
from common.kvcache.layout import KvLayout
from common.kvcache.reshape import BlockPart, Reshape, copy_parts

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvCache:
    """Implements KvStore. Owns its memory for life; it is given back when the object dies.

    layers: per layer a view [num_blocks, 2, num_kv_heads, block_size, head_dim] of `data`, in layout.dtype.
    On a CPU the memory is untouched until used, on huge pages where the kernel grants them. Contents start as zeros:
    a slot that was never written reads as zero, never as another process's bytes.
    Raises ValueError if num_blocks < 1 or the dtype is unknown, MemoryError where the memory can't be had.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """memory: the pool's own, uint8 zeros of its size, instead of newly allocated."""
        if num_blocks < 1 or layout.dtype not in TORCH_DTYPES:
            raise ValueError(f"no KV cache of {num_blocks} blocks of {layout.dtype!r}")
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        num_bytes = layout.num_layers * num_blocks * layout.block_bytes
        if memory is None:
            memory = zeroed_memory(num_bytes, device) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self.data = memory.view(TORCH_DTYPES[layout.dtype]).view(shape)
        self.num_blocks = num_blocks
        self.layers: tuple[torch.Tensor, ...] = tuple(self.data.unbind(0))
        self._layout = layout
        self._native = native_copies(device)
        # Copies move bytes, whatever the dtype: int64 words where a block is a multiple of them, as it is in practice.
        word = torch.int64 if num_bytes and layout.block_bytes % 8 == 0 else torch.uint8
        self._words = self.data.view(layout.num_layers, num_blocks, -1).view(word)

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def words(self) -> tuple[torch.Tensor, ...]:
        """All bytes, whatever the dtype, each part as [num_layers, num_blocks, words of a block]. Views; here one."""
        return (self._words,)

    @property
    def own(self) -> KvCache:
        """What this process computes on: itself."""
        return self

    @property
    def device(self) -> torch.device:
        return self.data.device

    def gather(self, first_layer: int, num_layers: int, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> int:
        """Copy blocks out, as KvStore says. Raises ValueError on a size or an id that doesn't fit, before anything is
        copied."""
        ids = self._check(first_layer, num_layers, block_ids, out)
        if self._native is not None and self._native.fits(num_layers * ids.size, self._layout.block_bytes):
            return self._native.gather(self._runs(first_layer, num_layers, ids), self._layout.block_bytes, out)
        packed = self._as_words(out, num_layers, ids.size)
        index = torch.from_numpy(ids).to(self.device)
        packed.copy_(gather_words(self._words[first_layer : first_layer + num_layers], index))
        return checksum_of(out)

    def scatter(self, first_layer: int, num_layers: int, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> int:
        """Copy blocks in, as KvStore says. Raises ValueError like gather."""
        ids = self._check(first_layer, num_layers, block_ids, data)
        if self._native is not None and self._native.fits(num_layers * ids.size, self._layout.block_bytes):
            return self._native.scatter(data, self._runs(first_layer, num_layers, ids), self._layout.block_bytes)
        # torch has no read-only tensors, and warns.
        packed = self._as_words(data if data.flags.writeable else data.copy(), num_layers, ids.size)
        index = torch.from_numpy(ids).to(self.device)
        scatter_words(self._words[first_layer : first_layer + num_layers], index, packed.to(self.device))
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
        """Copy parts of blocks of another shape in, as KvStore says. Raises ValueError like gather."""
        wire, own = reshape.wire, self._layout
        if not 0 <= first_layer < first_layer + num_layers <= own.num_layers:
            raise ValueError(f"layers [{first_layer}, {first_layer + num_layers}) of {own.num_layers}")
        if any(not 0 <= block_id < self.num_blocks for block_id in block_ids):
            raise ValueError(f"block ids {min(block_ids)}..{max(block_ids)} of {self.num_blocks} blocks")
        if (wire.dtype, wire.head_dim) != (own.dtype, own.head_dim) or reshape.local != own:
            raise ValueError(f"{wire} does not fill {own}")
        if not data.nbytes or data.nbytes % (num_layers * wire.block_bytes) or not data.flags.c_contiguous:
            raise ValueError(f"{data.nbytes} bytes are no blocks of {wire.block_bytes} in {num_layers} layers")
        packed = torch.frombuffer(data if data.flags.writeable else data.copy(), dtype=torch.uint8)
        shape = (num_layers, -1, 2, wire.num_kv_heads, wire.block_size, wire.head_dim)
        source = packed.view(TORCH_DTYPES[wire.dtype]).view(shape).to(self.device)
        copy_parts(self.data[first_layer : first_layer + num_layers], source, parts, block_ids, reshape)
        return checksum_of(data)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The content of each pair's first block, over all layers, into its second. No block is in both places."""
        sources, targets = (torch.tensor(ids, device=self.device) for ids in zip(*pairs, strict=True))
        self._words[:, targets] = self._words[:, sources]

    def _check(
        self, first_layer: int, num_layers: int, block_ids: Sequence[int], buffer: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.int64]:
        """block_ids as int64 [n]."""
        ids = np.asarray(block_ids, dtype=np.int64)
        wanted = num_layers * ids.size * self._layout.block_bytes
        if not 0 <= first_layer <= first_layer + num_layers <= self._layout.num_layers:
            raise ValueError(f"layers [{first_layer}, {first_layer + num_layers}) of {self._layout.num_layers}")
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            raise ValueError(f"block ids {ids.min()}..{ids.max()} of {self.num_blocks} blocks")
        if buffer.nbytes != wanted or not buffer.flags.c_contiguous:
            raise ValueError(f"buffer of {buffer.nbytes} bytes for {wanted}, or not contiguous")
        return ids

    def _runs(self, first_layer: int, num_layers: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Addresses of the blocks, uint64 [num_layers * n], layer by layer."""
        layers = np.arange(first_layer, first_layer + num_layers, dtype=np.int64)[:, None] * self.num_blocks
        offsets = (layers + ids[None, :]).astype(np.uint64) * np.uint64(self._layout.block_bytes)
        return (offsets + np.uint64(self.data.data_ptr())).ravel()

    def _as_words(self, buffer: npt.NDArray[np.uint8], num_layers: int, num_blocks: int) -> torch.Tensor:
        """`buffer` seen as words [num_layers, num_blocks, words a block]."""
        packed = torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else torch.empty(0, dtype=torch.uint8)
        return packed.view(num_layers, num_blocks, self._layout.block_bytes).view(self._words.dtype)


def num_blocks_for(layout: KvLayout, budget_bytes: int) -> int:
    """Whole blocks (over all layers) that fit into `budget_bytes`; 0 if not even one does."""
    return budget_bytes // (layout.num_layers * layout.block_bytes)
