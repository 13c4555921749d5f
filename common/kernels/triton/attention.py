"""Causal grouped-query attention over the paged pool, for whole steps: chunks and decodes, no copy to the host.

Both kernels pack the G queries that share a KV head into the rows of one matrix product, and read K and V through the
block table, any block size:

    token n of a sequence   block = table[n // block_size]   row = n % block_size
    pool                    [block, 0 | 1, kv_head, row, :]            0: K, 1: V

Grids depend on shapes alone, never on lengths: programs past a sequence's end return at once. So the launch of a decode
step can be captured in a CUDA graph. A split is a fixed number of tokens, not a fixed share: a sequence's sums are cut
the same way whoever it shares the step with.

Online softmax: Milakov, Gimelshein 2018, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691; split KV with merge by
log-sum-exp: Flash-Decoding (Dao et al. 2023); paging: arXiv:2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from common.kernels.triton.dot import dot, precision_of

SPLIT_TOKENS: Final = 512
# Keys of one step of the inner loop, and queries times tokens of one program of a chunk: what registers can hold.
TILE_TOKENS: Final = {torch.float32: 32, torch.bfloat16: 64}
CHUNK_ROWS: Final = {torch.float32: 32, torch.bfloat16: 64}
_LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's extents, on the device: int32 query_start [S + 1], seq_lens [S], block_tables [S, B].

    only_decodes: every sequence has one new token.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    only_decodes: bool


@triton.jit
def attend(
    q, pool_ptr, table_ptr, kv_head, num_kv_heads, block_size, first, end, last_key, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q [ROWS, BLOCK_D] over keys [first, end), row r over those up to last_key[r].

    → weighted sum of V [ROWS, BLOCK_D] float32, sum of weights [ROWS], and their exponent's maximum [ROWS] in base 2.
    """
    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    # Finite: a row that sees nothing must not compute -inf - -inf.
    highest = tl.full([ROWS], -1.0e30, dtype=tl.float32)
    kv_stride = num_kv_heads * block_size * D
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        inside = key < end
        block = tl.load(table_ptr + key // block_size, mask=inside, other=0).to(tl.int64)
        row = block * 2 * kv_stride + (kv_head * block_size + key % block_size) * D
        mask = inside[:, None] & (dim < D)[None, :]
        k = tl.load(pool_ptr + row[:, None] + dim[None, :], mask=mask, other=0.0)
        scores = dot(q, tl.trans(k), PRECISION) * scale
        scores = tl.where(inside[None, :] & (key[None, :] <= last_key[:, None]), scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        shrink = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        v = tl.load(pool_ptr + kv_stride + row[:, None] + dim[None, :], mask=mask, other=0.0)
        acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v, PRECISION)
        total = total * shrink + tl.sum(weights, axis=1)
        highest = new_highest
    return acc, total, highest


@triton.jit
def decode_kernel(
    q_ptr, pool_ptr, starts_ptr, lens_ptr, tables_ptr, out_ptr, lse_ptr,
    scale, num_kv_heads, block_size, q_row, table_row, num_splits,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split): the sequence's one query against SPLIT tokens of its context.

    out: float32 [S, heads, num_splits, D], lse [S, heads, num_splits] in base 2; only splits that exist are written.
    """
    s, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    token = tl.load(starts_ptr + s)
    length = tl.load(lens_ptr + s)
    if (tl.load(starts_ptr + s + 1) - token == 1) & (split * SPLIT < length):
        member, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        head = kv_head * G + member
        mask = (member < G)[:, None] & (dim < D)[None, :]
        q = tl.load(q_ptr + token.to(tl.int64) * q_row + head[:, None] * D + dim[None, :], mask=mask, other=0.0)
        acc, total, highest = attend(
            q, pool_ptr, tables_ptr + s * table_row, kv_head, num_kv_heads, block_size,
            split * SPLIT, tl.minimum(length, split * SPLIT + SPLIT), tl.full([ROWS], length - 1, tl.int32), scale,
            D, BLOCK_D, ROWS, TILE, PRECISION,
        )  # fmt: skip
        place = (s * num_kv_heads * G + head) * num_splits + split
        tl.store(out_ptr + place[:, None] * D + dim[None, :], acc / total[:, None], mask=mask)
        tl.store(lse_ptr + place, highest + tl.log2(total), mask=member < G)


@triton.jit
def merge_kernel(
    part_ptr, lse_ptr, starts_ptr, lens_ptr, out_ptr, num_heads, num_splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head): the splits' results, weighted by 2 ** lse. A sequence of length 0 is padding: zeros."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(starts_ptr + s)
    if tl.load(starts_ptr + s + 1) - token == 1:
        dim = tl.arange(0, BLOCK_D)
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        total, highest = 0.0, -1.0e30
        first = (s * num_heads + head) * num_splits
        for split in range(tl.cdiv(tl.load(lens_ptr + s), SPLIT)):
            lse = tl.load(lse_ptr + first + split)
            part = tl.load(part_ptr + (first + split) * D + dim, mask=dim < D, other=0.0)
            new_highest = tl.maximum(highest, lse)
            shrink, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
            acc = acc * shrink + part * weight
            total = total * shrink + weight
            highest = new_highest
        result = acc / tl.where(total > 0.0, total, 1.0)
        place = out_ptr + (token.to(tl.int64) * num_heads + head) * D + dim
        tl.store(place, result.to(out_ptr.dtype.element_ty), mask=dim < D)


@triton.jit
def owner_of(tile, starts_ptr, num_owners, TILE: tl.constexpr):
    """Rows lie owner after owner, owner o's from starts[o] on, and each owner is cut into tiles of its own. Owner o's
    are numbered from starts[o] // TILE + o on: enough for any lengths, and no count is needed on the host.

    → the owner of `tile`, and the tile's number within it, which may lie past its end.
    """
    low, high = tile * 0, tile * 0 + num_owners
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) // TILE + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low, tile - (tl.load(starts_ptr + low) // TILE + low)


@triton.jit
def chunk_kernel(
    q_ptr, pool_ptr, starts_ptr, lens_ptr, tables_ptr, out_ptr,
    scale, num_sequences, num_kv_heads, block_size, q_row, table_row,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): TOKENS tokens of a chunk, G queries each, against prefix and chunk.

    Row r of the tile is query r % G of token r // G. Sequences of one token are left to decode_kernel.
    """
    kv_head = tl.program_id(1)
    s, tile = owner_of(tl.program_id(0), starts_ptr, num_sequences, TOKENS)
    start = tl.load(starts_ptr + s)
    count = tl.load(starts_ptr + s + 1) - start
    if (count > 1) & (tile * TOKENS < count):
        length = tl.load(lens_ptr + s)
        row, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        token = tile * TOKENS + row // G
        mask = ((row < TOKENS * G) & (token < count))[:, None] & (dim < D)[None, :]
        head = kv_head * G + row % G
        q_place = (start + token).to(tl.int64) * q_row + head * D
        q = tl.load(q_ptr + q_place[:, None] + dim[None, :], mask=mask, other=0.0)
        prefix = length - count
        end = prefix + tl.minimum(count, tile * TOKENS + TOKENS)
        acc, total, _ = attend(
            q, pool_ptr, tables_ptr + s.to(tl.int64) * table_row, kv_head, num_kv_heads, block_size,
            0, end, prefix + token, scale, D, BLOCK_D, ROWS, TILE, PRECISION,
        )  # fmt: skip
        place = ((start + token).to(tl.int64) * num_kv_heads * G + head) * D
        tl.store(
            out_ptr + place[:, None] + dim[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask
        )


def attention(q: torch.Tensor, pool: torch.Tensor, plan: StepPlan, scale: float) -> torch.Tensor:
    """See Kernels.attention. q: [T, num_heads, D], the last two dimensions dense."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[2], pool.shape[3]
    num_sequences, width = plan.block_tables.shape
    group = num_heads // num_kv_heads
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device)
    num_splits = triton.cdiv(width * block_size, SPLIT_TOKENS)
    parts = torch.empty(num_sequences, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_sequences, num_heads, num_splits, dtype=torch.float32, device=q.device)
    common = {
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "G": group,
        "TILE": TILE_TOKENS[q.dtype],
        "PRECISION": precision_of(q.dtype),
    }
    extents = (plan.query_start, plan.seq_lens, plan.block_tables)
    decode_kernel[(num_sequences, num_kv_heads, num_splits)](
        q, pool, *extents, parts, lse, scale * _LOG2_E, num_kv_heads, block_size, q.stride(0), width, num_splits,
        ROWS=max(16, triton.next_power_of_2(group)), SPLIT=SPLIT_TOKENS, num_warps=4, num_stages=2, **common,
    )  # fmt: skip
    merge_kernel[(num_sequences, num_heads)](
        parts, lse, plan.query_start, plan.seq_lens, out, num_heads, num_splits,
        D=head_dim, BLOCK_D=common["BLOCK_D"], SPLIT=SPLIT_TOKENS, num_warps=1,
    )  # fmt: skip
    if not plan.only_decodes:
        rows = max(CHUNK_ROWS[q.dtype], triton.next_power_of_2(group))
        tokens = rows // group
        chunk_kernel[(num_tokens // tokens + num_sequences, num_kv_heads)](
            q, pool, *extents, out, scale * _LOG2_E, num_sequences, num_kv_heads, block_size, q.stride(0), width,
            ROWS=rows, TOKENS=tokens, num_warps=4, num_stages=2, **common,
        )  # fmt: skip
    return out
