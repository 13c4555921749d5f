"""How a sequence's blocks are cut into pieces, one a landing slot, and how the receiver knows that none is missing.

unit = one block in one layer          piece = layers [first_layer, +num_layers) × blocks [first_block, +num_blocks)

layer  ┌───────┬───────┬───┐   a block fits a slot over all layers: several blocks a piece, all layers
       │ piece │ piece │ … │
       └───────┴───────┴───┘
       ┌───────┬───┐           it does not: the layers are split evenly
       │ piece │ … │
       ├───────┼───┤           Either way a full piece is more than half a slot, so that slots of 1 MiB
       │ piece │ … │           give pieces of more than 512 KiB, which a network carries at full rate.
       └───────┴───┘
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.kvcache.layout import KvLayout


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks count from the first block of the sequence that is sent. Its bytes are layer-major, densely packed."""

    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int

    @property
    def num_units(self) -> int:
        return self.num_layers * self.num_blocks


@dataclass(frozen=True, slots=True)
class PieceGeometry:
    """block_bytes: of one unit. layers_per_piece × blocks_per_piece: the largest piece."""

    num_layers: int
    block_bytes: int
    layers_per_piece: int
    blocks_per_piece: int

    @property
    def layer_groups(self) -> int:
        return -(-self.num_layers // self.layers_per_piece)


def plan_geometry(layout: KvLayout, slot_bytes: int) -> PieceGeometry:
    """The largest pieces for slots of `slot_bytes`. Raises ValueError, naming both sizes, if not even one block of one
    layer fits a slot."""
    units = slot_bytes // layout.block_bytes
    if units == 0:
        raise ValueError(
            f"a KV block of one layer has {layout.block_bytes} bytes, a landing slot only {slot_bytes}: "
            f"raise landing_slot_bytes to {layout.block_bytes} or more, or lower block_size"
        )
    groups = -(-layout.num_layers // units)
    layers_per_piece = -(-layout.num_layers // groups)
    return PieceGeometry(layout.num_layers, layout.block_bytes, layers_per_piece, units // layers_per_piece)


class PieceCutter:
    """Cuts pieces off blocks as they become available: as large as they can be, block groups in order, and within a
    group its layers in order. Every unit is in exactly one piece."""

    def __init__(self, geometry: PieceGeometry) -> None:
        self._geometry = geometry
        self._available = 0
        self._first_block = 0
        # The block group being cut: 0 blocks between groups.
        self._group_blocks = 0
        self._next_layer = 0

    def add(self, num_blocks: int) -> None:
        self._available += num_blocks

    def cut(self) -> Piece | None:
        """The next piece, or None where all available blocks are cut."""
        geometry = self._geometry
        if self._group_blocks == 0:
            self._group_blocks = min(geometry.blocks_per_piece, self._available - self._first_block)
            if self._group_blocks == 0:
                return None
        num_layers = min(geometry.layers_per_piece, geometry.num_layers - self._next_layer)
        piece = Piece(self._next_layer, num_layers, self._first_block, self._group_blocks)
        self._next_layer += num_layers
        if self._next_layer == geometry.num_layers:
            self._first_block += self._group_blocks
            self._group_blocks = self._next_layer = 0
        return piece

    def num_left(self) -> int:
        """How many pieces cut() would give now."""
        geometry = self._geometry
        in_group = (
            -(-(geometry.num_layers - self._next_layer) // geometry.layers_per_piece) if self._group_blocks else 0
        )
        untouched = self._available - self._first_block - self._group_blocks
        return in_group + -(-untouched // geometry.blocks_per_piece) * geometry.layer_groups


class Coverage:
    """Which units of a transfer have a piece. Bounds are checked here: a piece comes from the network."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._covered: npt.NDArray[np.bool_] = np.zeros((num_layers, num_blocks), dtype=np.bool_)
        self._missing = num_layers * num_blocks

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def claim(self, piece: Piece) -> bool:
        """Cover the piece's units. False, and no change, if it is empty, out of bounds, or overlaps a covered unit."""
        num_layers, num_blocks = self._covered.shape
        if not (piece.num_layers > 0 and 0 <= piece.first_layer <= num_layers - piece.num_layers):
            return False
        if not (piece.num_blocks > 0 and 0 <= piece.first_block <= num_blocks - piece.num_blocks):
            return False
        units = self._units(piece)
        if units.any():
            return False
        units[:] = True
        self._missing -= piece.num_units
        return True

    def unclaim(self, piece: Piece) -> None:
        """Undo a successful claim: the piece was refused and comes again."""
        self._units(piece)[:] = False
        self._missing += piece.num_units

    def _units(self, piece: Piece) -> npt.NDArray[np.bool_]:
        return self._covered[
            piece.first_layer : piece.first_layer + piece.num_layers,
            piece.first_block : piece.first_block + piece.num_blocks,
        ]
