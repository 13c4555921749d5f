"""Decode steps as CUDA graphs: hundreds of launches replayed by one call, which else cost more time than they compute.

A graph has fixed shapes. Steps are padded to one of a few, each captured once, at the start, on the same tensors:

    sequences   1 2 4 8 16 24 32 …  up to max_running        table width   every power of 4 blocks, up to the context
    padding     sequence: length 0, slot -1, table of zeros: the kernels skip it, and write nothing for it

Grids follow shapes alone (attention.py), so what a graph computes follows from what its input tensors hold. Attention
of a sequence is that of the step not padded: its splits are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.engine.batch import Batch
from common.kvcache.kv_cache import KvCache
from common.model.config import ModelConfig
from common.model.interface import Model

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], Step]


@dataclass(frozen=True, slots=True)
class DecodeShapes:
    """Both ascending: numbers of sequences, and widths of block tables, that graphs exist for."""

    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    def fit(self, num_sequences: int, width: int) -> tuple[int, int] | None:
        """The smallest that holds the step, or None."""
        size, column = bisect_left(self.sizes, num_sequences), bisect_left(self.widths, width)
        if size == len(self.sizes) or column == len(self.widths):
            return None
        return self.sizes[size], self.widths[column]


def decode_shapes(max_running: int, max_blocks: int) -> DecodeShapes:
    """Up to `max_running` sequences of up to `max_blocks` blocks. Past 8, steps of 8: tensor cores' rows."""
    sizes = {size for size in (1, 2, 4, *range(8, max_running, 8)) if size < max_running}
    widths, width = {max_blocks}, 16
    while width < max_blocks:
        widths.add(width)
        width *= 4
    return DecodeShapes(tuple(sorted(sizes | {max_running})), tuple(sorted(widths)))


def padding(size: int, width: int, device: torch.device) -> Batch:
    """A step of `size` sequences that are all padding."""
    return Batch(
        token_ids=torch.zeros(size, dtype=torch.int64, device=device),
        positions=torch.zeros(size, dtype=torch.int64, device=device),
        slot_mapping=torch.full((size,), -1, dtype=torch.int64, device=device),
        query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(size, dtype=torch.int32, device=device),
        block_tables=torch.zeros(size, width, dtype=torch.int32, device=device),
        logits_rows=torch.arange(size, device=device),
    )


def fill(static: Batch, batch: Batch) -> None:
    """Copy a decode step into `static`, which is as large or larger; what remains of it becomes padding."""
    count, width = batch.block_tables.shape
    for field in ("token_ids", "positions", "slot_mapping", "seq_lens"):
        getattr(static, field)[:count].copy_(getattr(batch, field))
    static.slot_mapping[count:] = -1
    static.seq_lens[count:] = 0
    static.block_tables[:count, :width].copy_(batch.block_tables)


def is_plain_decode(batch: Batch) -> bool:
    """Every sequence has one new token, and wants its logits. From shapes alone."""
    return batch.token_ids.numel() == batch.num_sequences == batch.logits_rows.numel()


class GraphedModel:
    """Implements Model: replays decode steps, and passes all others on to `model`, which it takes over.

    Valid for steps on `kv_cache` alone. `capture` runs a step once and gives what repeats it: the result lies in the
    same tensor each time, until the next step of the same shape.
    """

    def __init__(self, model: Model, kv_cache: KvCache, shapes: DecodeShapes, capture: Capture) -> None:
        """Captures every shape, the largest first, so that the others find its memory free again."""
        self._model = model
        self._kv_cache = kv_cache
        self._shapes = shapes
        self._steps: dict[tuple[int, int], tuple[Batch, Step]] = {}
        for width in reversed(shapes.widths):
            for size in reversed(shapes.sizes):
                static = padding(size, width, kv_cache.device)
                self._steps[size, width] = static, capture(self._step_on(static))

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """See Model.forward."""
        shape = self._shapes.fit(*batch.block_tables.shape) if is_plain_decode(batch) else None
        if shape is None or kv_cache is not self._kv_cache:
            return self._model.forward(batch, kv_cache)
        static, replay = self._steps[shape]
        fill(static, batch)
        return replay()[: batch.num_sequences]

    def _step_on(self, static: Batch) -> Step:
        return lambda: self._model.forward(static, self._kv_cache)


def cuda_capture() -> Capture:
    """Graphs that share one pool of memory: they run one after another. Each step runs once before it is captured,
    since Triton compiles and cuBLAS allocates at the first call."""
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Step) -> Step:
        with torch.inference_mode():
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture
