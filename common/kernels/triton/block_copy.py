"""Blocks of KV out of and into the pool, for transfer: many small scattered pieces, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(
    pool_ptr, packed_ptr, ids_ptr, num_ids, words, pool_layer, INTO_POOL: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (id, layer, piece): pool[layer, ids[i], piece] ↔ packed[layer, i, piece]."""
    i, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    in_pool = pool_ptr + layer * pool_layer + tl.load(ids_ptr + i) * words + word
    in_packed = packed_ptr + (layer * num_ids + i) * words + word
    if INTO_POOL:
        tl.store(in_pool, tl.load(in_packed, mask=inside), mask=inside)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=inside), mask=inside)


def gather_blocks(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """words: [layers, num_blocks, W], the last two dimensions dense; ids: int64 [n] → [layers, n, W]."""
    packed = torch.empty(words.shape[0], len(ids), words.shape[2], dtype=words.dtype, device=words.device)
    _copy(words, packed, ids, into_pool=False)
    return packed


def scatter_blocks(words: torch.Tensor, ids: torch.Tensor, packed: torch.Tensor) -> None:
    """The other way: packed [layers, n, W], contiguous. ids are distinct."""
    _copy(words, packed, ids, into_pool=True)


def _copy(words: torch.Tensor, packed: torch.Tensor, ids: torch.Tensor, *, into_pool: bool) -> None:
    num_layers, num_ids, num_words = packed.shape
    if packed.numel():
        block = min(1024, triton.next_power_of_2(num_words))
        copy_blocks_kernel[(num_ids, num_layers, triton.cdiv(num_words, block))](
            words, packed, ids, num_ids, num_words, words.stride(0), INTO_POOL=into_pool, BLOCK=block, num_warps=4
        )
