"""Shape of the paged KV cache, and the pieces in which blocks travel. No torch here: routers and tests import it.

One layer's pool, and one block of it (what a block table entry points at):

    pool  [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block            [2, num_kv_heads, block_size, head_dim]      2: K then V
    slot  = block_id * block_size + offset                        one token's place in a layer's pool
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from common.kvcache.reshape import BlockPart, Reshape

LAYOUT_NAME: Final = "layer,block,kv,head,token,dim"
DTYPE_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """dtype: "float32" or "bfloat16". num_kv_heads: those held here, of the model's the ones from first_kv_head on, as
    rank tp_rank of tp_size (see reshape.py)."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    first_kv_head: int = 0
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def end_kv_head(self) -> int:
        """Behind the last of the model's KV heads that are held here."""
        return self.first_kv_head + self.num_kv_heads

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, K and V."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return self.num_layers * self.block_bytes // self.block_size


class KvStore(Protocol):
    """What a KV cache offers to transfer. All calls copy, may run in any thread, and return the checksum (checksum.py)
    of the packed bytes.

    The caller guarantees that the blocks are not reused, and (scatter) not read, during the call. `data` may change
    during a scatter: then what is returned is the checksum of what is in the blocks now, or of what is in `data` after
    the copy, never of what was there before it (see kv_transfer/landing_ring.py).
    Bytes are layer-major, then block, each block as in the layout above, densely packed:
    len(out) == num_layers * len(block_ids) * layout.block_bytes.
    """

    @property
    def layout(self) -> KvLayout: ...

    def gather(
        self, first_layer: int, num_layers: int, block_ids: Sequence[int], out: npt.NDArray[np.uint8]
    ) -> int: ...

    def scatter(
        self, first_layer: int, num_layers: int, block_ids: Sequence[int], data: npt.NDArray[np.uint8]
    ) -> int: ...

    def scatter_parts(
        self,
        first_layer: int,
        num_layers: int,
        block_ids: Sequence[int],
        data: npt.NDArray[np.uint8],
        parts: Sequence[BlockPart],
        reshape: Reshape,
    ) -> int:
        """As scatter, of bytes packed in reshape.wire's layout: only `parts` are written, and only the heads held here.
        block_ids: all blocks of the transfer; parts count in them, and in the wire blocks of `data`."""
        ...
