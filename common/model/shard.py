"""What one rank of a tensor-parallel group holds of a model (Megatron-LM, arXiv:1909.08053). Pure arithmetic, no torch.

    column-parallel   q, k, v, gate, up, and their biases: a rank has some of the rows (of heads, of the inner width)
    row-parallel      o, down: a rank has the columns that its rows above feed; the ranks' results are summed
    vocabulary        embedding and output head: a rank has some of the rows
    everywhere        norms, the routing among experts

Attention is shared out by KV heads with the query heads that read them. Where there are more ranks than KV heads,
neighbours hold the same one and share its query heads out; where that does not come out even, some ranks have one head
more than others, or none. Experts are shared out by their inner width: each rank has a slice of every expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from common.model.checkpoint import EMBED, LM_HEAD
from common.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. Raises ValueError where there is no such rank."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")

    def of(self, total: int) -> slice:
        """The rank's share of `total` things in order: shares are adjacent, and differ by one at most."""
        return slice(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    def kv_heads(self, config: ModelConfig) -> slice:
        """The KV heads that are held here; also another rank's where they are fewer than ranks."""
        if _replicates(config, self.size):
            first = self.rank * config.num_kv_heads // self.size
            return slice(first, first + 1)
        return self.of(config.num_kv_heads)

    def heads(self, config: ModelConfig) -> slice:
        """The query heads; they read the KV heads that are held here, equally many each."""
        if _replicates(config, self.size):
            return self.of(config.num_heads)
        group = config.num_heads // config.num_kv_heads
        return _scaled(self.kv_heads(config), group)


WHOLE: Final = Shard(0, 1)


def _replicates(config: ModelConfig, size: int) -> bool:
    return size > config.num_kv_heads and size % config.num_kv_heads == 0 and config.num_heads % size == 0


def _scaled(share: slice, factor: int) -> slice:
    return slice(share.start * factor, share.stop * factor)


def _length(share: slice) -> int:
    return int(share.stop - share.start)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """`config` with the heads, inner width and vocabulary rows of one rank; the very same for WHOLE."""
    return replace(
        config,
        num_heads=_length(shard.heads(config)),
        num_kv_heads=_length(shard.kv_heads(config)),
        intermediate_size=_length(shard.of(config.intermediate_size)),
        vocab_size=_length(shard.of(config.vocab_size)),
    )


def tensor_share(name: str, config: ModelConfig, shard: Shard) -> tuple[slice, slice]:
    """Rows and columns of the checkpoint's tensor `name` that a rank holds; slice(None) is all of them, and what a
    vector has of columns."""
    everything = slice(None)
    if shard == WHOLE:
        return everything, everything
    if name in (EMBED, LM_HEAD):
        return shard.of(config.vocab_size), everything
    kind = name.rsplit(".", 2)[-2]
    if kind == "q_proj":
        return _scaled(shard.heads(config), config.head_dim), everything
    if kind in ("k_proj", "v_proj"):
        return _scaled(shard.kv_heads(config), config.head_dim), everything
    if kind == "o_proj":
        return everything, _scaled(shard.heads(config), config.head_dim)
    inner = shard.of(config.intermediate_size)
    if kind in ("gate_proj", "up_proj", "w1", "w3"):
        return inner, everything
    if kind in ("down_proj", "w2"):
        return everything, inner
    return everything, everything
