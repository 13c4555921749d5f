"""How a step's attention splits up: computed once a step on the host, used by every layer.

A sequence with several new tokens is a chunk, with one new token a decode. Decodes of similar length share a group and
run as one padded batch; a group's padding and size are bounded, so that neither one long sequence nor a large batch
makes a huge temporary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from common.engine.batch import Batch

TILE_ROWS: Final = 512  # query rows of a chunk that attend at once; bounds the mask, and skips keys in the future
_GROUP_TOKENS: Final = 8 * 1024  # most context tokens of a decode group, padding included
_MAX_PADDING: Final = 2  # a group's longest context is at most this many times its shortest …
_SHORT_TOKENS: Final = 256  # … unless it is this short


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first_row, end_row) of the step are positions [start, start + rows) of a sequence.

    block_ids: int64 [n], the blocks of positions [0, start + rows).
    """

    first_row: int
    end_row: int
    start: int
    block_ids: torch.Tensor

    @property
    def context(self) -> int:
        """Tokens that the chunk's last row attends to."""
        return self.start + self.end_row - self.first_row


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """n sequences of one new token, padded to B blocks.

    rows: int64 [n]. block_ids: int64 [n * B], padded with 0. mask: [n, B * block_size], added to scores: -inf where a
    sequence has no token, and what lies in the pool is another's, else 0. absent: the same as bool
    [n, B * block_size - shortest], only from the shortest context on.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    mask: torch.Tensor
    shortest: int
    absent: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """tile_mask: [tile rows, longest prefix + tile rows], added to scores; see _tile_mask."""

    chunks: tuple[Chunk, ...]
    groups: tuple[DecodeGroup, ...]
    tile_mask: torch.Tensor


def plan_attention(batch: Batch, block_size: int, dtype: torch.dtype) -> AttentionPlan:
    """Split `batch` up; masks are of the queries' `dtype`. Copies sequence lengths to the host; tensors stay on the
    batch's device."""
    bounds, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    chunks, decodes = [], []
    for i, length in enumerate(lengths):
        first, end = bounds[i], bounds[i + 1]
        if end - first == 1:
            decodes.append((length, i, first))
        else:
            block_ids = batch.block_tables[i, : -(-length // block_size)].long()
            chunks.append(Chunk(first, end, length - (end - first), block_ids))
    decodes.sort()
    groups = tuple(_group(members, batch, block_size, dtype) for members in _grouped(decodes))
    return AttentionPlan(tuple(chunks), groups, _tile_mask(chunks, dtype, batch.seq_lens.device))


def _grouped(decodes: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Runs of the (length, sequence, row) triples, which come sorted by length."""
    members: list[tuple[int, int, int]] = []
    for item in decodes:
        length = item[0]
        padded_too_much = members and length > max(_SHORT_TOKENS, _MAX_PADDING * members[0][0])
        if padded_too_much or (members and length * (len(members) + 1) > _GROUP_TOKENS):
            yield members
            members = []
        members.append(item)
    if members:
        yield members


def _group(members: list[tuple[int, int, int]], batch: Batch, block_size: int, dtype: torch.dtype) -> DecodeGroup:
    device = batch.seq_lens.device
    num_blocks = -(-members[-1][0] // block_size)
    sequences = torch.tensor([sequence for _, sequence, _ in members], device=device)
    lengths = torch.tensor([length for length, _, _ in members], device=device)
    absent = torch.arange(num_blocks * block_size, device=device) >= lengths[:, None]
    return DecodeGroup(
        rows=torch.tensor([row for _, _, row in members], device=device),
        block_ids=batch.block_tables[sequences, :num_blocks].long().flatten(),
        mask=torch.zeros(absent.shape, dtype=dtype, device=device).masked_fill_(absent, -torch.inf),
        shortest=members[0][0],
        absent=absent[:, members[0][0] :],
    )


def _tile_mask(chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One mask from which each tile takes its corner, since all tiles have the same diagonal:

            ◄── prefix, longest of the step ──►◄─── diagonal ───►
    row 0     0  0  0  0  0  0  0  0  0  0  0    0  -∞  -∞  -∞
    row 1     0  0  0  0  0  0  0  0  0  0  0    0   0  -∞  -∞         a tile with a shorter prefix starts further right
    """
    rows = min(TILE_ROWS, max((chunk.end_row - chunk.first_row for chunk in chunks), default=0))
    prefix = max((chunk.context for chunk in chunks), default=0)
    mask = torch.zeros(rows, prefix + rows, dtype=dtype, device=device)
    mask[:, prefix:] = torch.full((rows, rows), -torch.inf).triu_(1)
    return mask
