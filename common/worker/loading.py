"""From settings to what computes: model, KV cache, runner, and the numbers that both schedulers need."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from common.config import Settings
from common.device import resolve_device, with_captured_decodes
from common.engine.cost_rates import DEFAULT_RATES, CostRates
from common.engine.model_runner import ModelRunner
from common.engine.scheduler import SchedulerConfig
from common.errors import StartupError
from common.kernels.cpu.executor import NativeModel
from common.kvcache.block_pool import BlockPool
from common.kvcache.host_arena import HostArena
from common.kvcache.host_tier import HostTier
from common.kvcache.interface import KvPool
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache, num_blocks_for
from common.kvcache.layout import LAYOUT_NAME, KvLayout
from common.kvcache.prefix_cache import PrefixCache
from common.model.config import ModelConfig, load_model_config, resolve_dtype
from common.model.fingerprint import model_fingerprint
from common.model.interface import Model
from common.model.loader import load_model
from common.parallel.model import GroupPlan, load_group
from common.parallel.ranks import Ranks
from common.parallel.shared_kv import part_layouts
from common.support import check_support
from common.telemetry import get_logger
from common.worker.calibration import measure_rates
from kv_transfer.types import KvFormat

WARM_UP_TOKENS: Final = 64

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """max_model_len: tokens of a sequence that settings, model and KV pool all allow. host_slots: blocks that the host
    tier has room for; 0: there is none. rates: as measured when it was loaded. ranks: the other processes of a
    tensor-parallel group; they end with its context."""

    name: str
    config: ModelConfig
    fmt: KvFormat
    kv_cache: KvPool
    runner: ModelRunner
    max_model_len: int
    host_slots: int
    rates: CostRates = DEFAULT_RATES
    ranks: Ranks | None = None

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ranks is not None:
            self.ranks.close()

    def model_failure(self) -> str | None:
        return None if self.ranks is None else self.ranks.failure

    def prefix_cache(self, pool: BlockPool) -> PrefixCache:
        """On top of `pool`, with the host tier that the settings ask for. Raises StartupError where its memory can't be
        had."""
        if not self.host_slots:
            return PrefixCache(pool)
        try:
            arena = HostArena(self.kv_cache, self.host_slots)
        except (MemoryError, RuntimeError) as error:
            raise StartupError(
                f"no host memory for {self.host_slots} KV blocks ({error}): set host_kv_bytes lower"
            ) from None
        return PrefixCache(pool, HostTier(self.host_slots, arena))

    def scheduler_config(self, settings: Settings, chunk_budget_tokens: int, step_target_ms: float) -> SchedulerConfig:
        return SchedulerConfig(
            block_size=settings.block_size,
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            chunk_budget_tokens=chunk_budget_tokens,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            step_target_s=step_target_ms / 1e3,
            rates=self.rates,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and as what a model is to be loaded. num_threads: of the whole worker."""

    folder: Path
    config: ModelConfig
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    device: torch.device
    num_threads: int


def load(settings: Settings) -> LoadedModel:
    """Blocks for seconds. Raises StartupError, one line, for a bad model folder and for too little KV memory."""
    folder = Path(settings.model)
    config = load_model_config(folder)
    dtype = resolve_dtype(settings.dtype, config)
    device = resolve_device(settings.device)
    check_support(config.architecture, dtype, settings.quantization, settings.tensor_parallel, str(device))
    layout = KvLayout(config.num_layers, settings.block_size, config.num_kv_heads, config.head_dim, dtype)
    parts = part_layouts(layout, config, settings.tensor_parallel)
    num_blocks = settings.kv_cache_bytes // sum(part.num_layers * part.block_bytes for part in parts)
    max_model_len = context_limit(settings, config, num_blocks)
    held = settings.quantization
    place = _Place(
        folder=folder,
        config=config,
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        device=device,
        num_threads=settings.num_threads or len(os.sched_getaffinity(0)),
    )
    _log.info("loading weights", folder=str(folder), dtype=dtype, quantization=held, device=str(place.device))
    torch.set_num_threads(1)  # quantising takes many small operations: on a busy machine threads would cost, not save
    try:
        model, kv_cache, ranks = (
            _load_group(settings, place) if settings.tensor_parallel > 1 else _load(settings, place)
        )
    except MemoryError:
        raise StartupError(
            f"no memory for a KV cache of {settings.kv_cache_bytes} bytes: set kv_cache_bytes lower"
        ) from None
    try:
        runner = ModelRunner(model, kv_cache)
        _log.info("warming up", kv_blocks=num_blocks)
        runner.warm_up(WARM_UP_TOKENS)
        rates = measure_rates(runner, kv_cache, config)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    _log.info("measured", **asdict(rates))
    fmt = KvFormat(model_fingerprint(folder, held), LAYOUT_NAME, layout)
    host_slots = num_blocks_for(layout, settings.host_kv_bytes)
    name = settings.served_model_name or folder.name
    return LoadedModel(name, config, fmt, kv_cache, runner, max_model_len, host_slots, rates, ranks)


def _load(settings: Settings, place: _Place) -> tuple[Model, KvPool, Ranks | None]:
    model = load_model(
        place.folder,
        TORCH_DTYPES[place.layout.dtype],
        place.device,
        kernels=settings.kernels,
        num_threads=place.num_threads,
        quantization=settings.quantization,
    )
    # The native executor has threads of its own; torch's would only wait for them spinning, on the same cores.
    torch.set_num_threads(1 if isinstance(model, NativeModel) else place.num_threads)
    kv_cache = KvCache(place.layout, place.num_blocks, place.device)
    if settings.cuda_graphs:
        model = with_captured_decodes(model, kv_cache, settings.kernels, settings.max_running, place.max_model_len)
    return model, kv_cache, None


def _load_group(settings: Settings, place: _Place) -> tuple[Model, KvPool, Ranks | None]:
    """A share of the threads, and of the weights, for each rank."""
    if settings.kernels == "native":
        raise StartupError("the native kernels compute in one process: set kernels=torch, or tensor_parallel=1")
    size = settings.tensor_parallel
    num_threads = max(1, place.num_threads // size)
    _log.info("tensor parallelism: torch computes, not the native kernels", ranks=size, threads_each=num_threads)
    plan = GroupPlan(
        folder=place.folder,
        size=size,
        layout=place.layout,
        num_blocks=place.num_blocks,
        quantization=settings.quantization,
        num_threads=num_threads,
        log_level=settings.log_level,
        log_format=settings.log_format,
        name=settings.worker_id,
    )
    group = load_group(plan, place.config)
    torch.set_num_threads(num_threads)
    return group.model, group.kv_pool, group.ranks


def context_limit(settings: Settings, config: ModelConfig, num_blocks: int) -> int:
    """Raises StartupError where the KV cache is too small to be of use, or max_model_len more than the model's own."""
    if settings.max_model_len > config.max_position_embeddings:
        raise StartupError(
            f"max_model_len {settings.max_model_len} is more than the model's {config.max_position_embeddings}: "
            "lower it or leave it out"
        )
    wanted = settings.max_model_len or config.max_position_embeddings
    limit = min(wanted, num_blocks * settings.block_size)
    if num_blocks < 2 or (settings.max_model_len and limit < settings.max_model_len):
        raise StartupError(
            f"kv_cache_bytes {settings.kv_cache_bytes} holds {num_blocks * settings.block_size} tokens, "
            f"max_model_len is {wanted}: set kv_cache_bytes higher, or max_model_len or block_size lower"
        )
    return limit
