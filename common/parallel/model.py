"""Rank 0 of a tensor-parallel group as a Model: what it is asked to compute, the other ranks compute with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from common.engine.batch import Batch
from common.kernels.reference import ReferenceKernels
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.kvcache.layout import KvLayout
from common.model.config import ModelConfig
from common.model.llama import LlamaModel
from common.model.quantization import Quantization
from common.model.shard import Shard
from common.model.weights import load_weights
from common.parallel.batch_codec import encode_batch
from common.parallel.communicator import Communicator
from common.parallel.protocol import RankPlan
from common.parallel.ranks import Ranks
from common.parallel.shared_kv import SharedKvPool, SharedMemory, part_layouts, part_of, pool_bytes

_CPU = torch.device("cpu")


class ParallelModel:
    """Implements Model. Borrows `ranks`; owns rank 0's weights."""

    def __init__(self, model: LlamaModel, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """See Model.forward; kv_cache is rank 0's part. Raises RuntimeError where a rank is gone. After any error the
        group computes no more: the others may have gone another way."""
        try:
            self._ranks.send(encode_batch(batch))
            return self._model.forward(batch, kv_cache)
        except Exception as error:
            self._ranks.fail(f"a tensor-parallel step failed on rank 0: {' '.join(str(error).split())}")
            raise


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """A loaded group. The ranks are the caller's to close."""

    model: ParallelModel
    kv_pool: SharedKvPool
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """num_threads: of each rank. log_level, log_format, name: of the other ranks' logs."""

    folder: Path
    size: int
    layout: KvLayout
    num_blocks: int
    quantization: Quantization
    num_threads: int
    log_level: str
    log_format: Literal["console", "json"]
    name: str


def load_group(plan: GroupPlan, config: ModelConfig) -> ParallelGroup:
    """Starts the other ranks and loads with them. Raises StartupError, MemoryError; leaves no process behind then."""
    layouts = part_layouts(plan.layout, config, plan.size)
    memory = SharedMemory(pool_bytes(layouts, plan.num_blocks))
    try:
        ranks = Ranks(_rank_plan(plan, memory.fd))
    finally:
        memory.close()
    try:
        shard = Shard(0, plan.size)
        weights = load_weights(plan.folder, config, TORCH_DTYPES[plan.layout.dtype], _CPU, plan.quantization, shard)
        ranks.wait_ready()
        model = LlamaModel(config, weights, ReferenceKernels(), Communicator(shard, ranks.rendezvous))
    except BaseException:
        ranks.close()
        raise
    parts = [part_of(memory, layouts, rank, plan.num_blocks) for rank in range(plan.size)]
    return ParallelGroup(ParallelModel(model, ranks), SharedKvPool(plan.layout, parts), ranks)


def _rank_plan(plan: GroupPlan, kv_fd: int) -> RankPlan:
    return RankPlan(
        rank=0,
        size=plan.size,
        folder=str(plan.folder),
        dtype=plan.layout.dtype,
        quantization=plan.quantization,
        block_size=plan.layout.block_size,
        num_blocks=plan.num_blocks,
        kv_fd=kv_fd,
        rendezvous="",
        num_threads=plan.num_threads,
        log_level=plan.log_level,
        log_format=plan.log_format,
        name=plan.name,
    )
