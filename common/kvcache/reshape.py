"""KV that comes in one shape and is kept in another: blocks of another size, and more heads than are kept here.

Pure index arithmetic, plus one copy that numpy and torch run alike. wire: how blocks arrive; local: how they are kept.

    tokens        0         first_token                                        first_token + num_blocks · local size
    wire     ─────┼────┬────┬─│──┬────┬────┬────┐        blocks of wire.block_size, from the one that holds first_token
    local             held   ├───────┬───────┬──│────┤   blocks of local.block_size
                             └ part ─┴ part …   └ no more tokens: the rest of the last block is never read

    heads    [wire.first_kv_head, +wire.num_kv_heads)  ∩  [local.first_kv_head, +local.num_kv_heads)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.kvcache.layout import KvLayout


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Tokens that a wire block and a local block share, counted from 0 among the blocks of one transfer."""

    wire_block: int
    wire_offset: int
    block: int
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reshape:
    """How a transfer's wire blocks fill its local ones.

    first_token: of the sequence, the first that is not here yet; a multiple of local.block_size. num_blocks: local
    blocks to fill.
    """

    wire: KvLayout
    local: KvLayout
    first_token: int
    num_blocks: int

    @property
    def is_plain(self) -> bool:
        """Blocks are the same on both sides: they are copied whole."""
        return self.wire == self.local or (
            self.wire.block_size == self.local.block_size
            and (self.wire.first_kv_head, self.wire.num_kv_heads) == (self.local.first_kv_head, self.local.num_kv_heads)
        )

    @property
    def wire_origin(self) -> int:
        """Token at which the first wire block begins."""
        return self.first_token // self.wire.block_size * self.wire.block_size

    @property
    def end(self) -> int:
        """Behind the last token that the local blocks have room for."""
        return self.first_token + self.num_blocks * self.local.block_size

    def fits(self, num_wire_blocks: int) -> bool:
        """Whether so many wire blocks reach into the last local block, and all of them are of use."""
        if self.num_blocks == 0:
            return num_wire_blocks == 0
        wire_end = self.wire_origin + num_wire_blocks * self.wire.block_size
        return wire_end > self.end - self.local.block_size and wire_end - self.wire.block_size < self.end

    def num_tokens(self, num_wire_blocks: int) -> int:
        """Leading tokens of the sequence whose KV can be here after so many wire blocks."""
        if num_wire_blocks == 0:
            return self.first_token
        return min(self.end, self.wire_origin + num_wire_blocks * self.wire.block_size)

    def parts(self, first_wire_block: int, num_wire_blocks: int) -> list[BlockPart]:
        """What wire blocks [first, +num) bring, in order; without tokens that are here already, or find no room."""
        parts = []
        for wire_block in range(first_wire_block, first_wire_block + num_wire_blocks):
            start = self.wire_origin + wire_block * self.wire.block_size
            token, end = max(start, self.first_token), min(start + self.wire.block_size, self.end)
            while token < end:
                block, offset = divmod(token - self.first_token, self.local.block_size)
                count = min(self.local.block_size - offset, end - token)
                parts.append(BlockPart(wire_block - first_wire_block, token - start, block, offset, count))
                token += count
        return parts

    def heads(self) -> tuple[slice, slice]:
        """The heads that both hold: where they lie in a wire block, and where in a local one."""
        first = max(self.wire.first_kv_head, self.local.first_kv_head)
        end = min(self.wire.end_kv_head, self.local.end_kv_head)
        count = max(0, end - first)
        wire, local = max(0, first - self.wire.first_kv_head), max(0, first - self.local.first_kv_head)
        return slice(wire, wire + count), slice(local, local + count)


def copy_parts(target: Any, wire: Any, parts: Iterable[BlockPart], block_ids: Sequence[int], reshape: Reshape) -> None:
    """Write `wire` into `target`, which alone is changed. numpy arrays or torch tensors, of one dtype:

    target  [num_layers, pool blocks, 2, local heads, local block_size, head_dim]
    wire    [num_layers, wire blocks, 2, wire heads, wire block_size, head_dim]
    block_ids: pool blocks of the transfer; parts count in them.
    """
    wire_heads, heads = reshape.heads()
    alike: defaultdict[tuple[int, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for part in parts:
        wire_blocks, ids = alike[part.wire_offset, part.offset, part.num_tokens]
        wire_blocks.append(part.wire_block)
        ids.append(block_ids[part.block])
    # One copy for all parts that lie alike in their blocks: at most as many as the larger block has tokens.
    for (wire_offset, offset, count), (wire_blocks, ids) in alike.items():
        source = wire[:, wire_blocks][:, :, :, wire_heads, wire_offset : wire_offset + count]
        target[:, ids, :, heads, offset : offset + count] = source


def shard(full: KvLayout, tp_rank: int, tp_size: int) -> KvLayout:
    """The layout that one rank of a tensor-parallel group holds of `full`: its heads, in order; where there are more
    ranks than heads, neighbours hold the same one. Raises ValueError where they can't be shared out evenly."""
    heads = full.num_kv_heads
    if not 0 <= tp_rank < tp_size or (heads % tp_size and tp_size % heads):
        raise ValueError(f"{heads} KV heads can't be shared out to rank {tp_rank} of {tp_size}")
    return KvLayout(
        num_layers=full.num_layers,
        block_size=full.block_size,
        num_kv_heads=max(1, heads // tp_size),
        head_dim=full.head_dim,
        dtype=full.dtype,
        first_kv_head=tp_rank * heads // tp_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
