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
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache, num_blocks_for
from common.kvcache.layout import LAYOUT_NAME, KvLayout
from common.kvcache.prefix_cache import PrefixCache
from common.model.config import ModelConfig, load_model_config, resolve_dtype
from common.model.fingerprint import model_fingerprint
from common.model.loader import load_model
from common.telemetry import get_logger
from common.worker.calibration import measure_rates
from kv_transfer.types import KvFormat

WARM_UP_TOKENS: Final = 64

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """max_model_len: tokens of a sequence that settings, model and KV pool all allow. host_slots: blocks that the host
    tier has room for; 0: there is none. rates: as measured when it was loaded."""

    name: str
    config: ModelConfig
    fmt: KvFormat
    kv_cache: KvCache
    runner: ModelRunner
    max_model_len: int
    host_slots: int
    rates: CostRates = DEFAULT_RATES

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


def load(settings: Settings) -> LoadedModel:
    """Blocks for seconds. Raises StartupError, one line, for a bad model folder and for too little KV memory."""
    folder = Path(settings.model)
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    config = load_model_config(folder)
    dtype = resolve_dtype(settings.dtype, config)
    device = resolve_device(settings.device)
    layout = KvLayout(config.num_layers, settings.block_size, config.num_kv_heads, config.head_dim, dtype)
    num_blocks = num_blocks_for(layout, settings.kv_cache_bytes)
    max_model_len = context_limit(settings, config, num_blocks)
    held = settings.quantization
    _log.info("loading weights", folder=str(folder), dtype=dtype, quantization=held, device=str(device))
    torch.set_num_threads(1)  # quantising takes many small operations: on a busy machine threads would cost, not save
    model = load_model(
        folder,
        TORCH_DTYPES[dtype],
        device,
        kernels=settings.kernels,
        num_threads=num_threads,
        quantization=held,
    )
    # The native executor has threads of its own; torch's would only wait for them spinning, on the same cores.
    torch.set_num_threads(1 if isinstance(model, NativeModel) else num_threads)
    try:
        kv_cache = KvCache(layout, num_blocks, device)
    except MemoryError:
        raise StartupError(
            f"no memory for a KV cache of {settings.kv_cache_bytes} bytes: set kv_cache_bytes lower"
        ) from None
    if settings.cuda_graphs:
        model = with_captured_decodes(model, kv_cache, settings.kernels, settings.max_running, max_model_len)
    runner = ModelRunner(model, kv_cache)
    _log.info("warming up", kv_blocks=num_blocks)
    runner.warm_up(WARM_UP_TOKENS)
    rates = measure_rates(runner, kv_cache, config)
    _log.info("measured", **asdict(rates))
    fmt = KvFormat(model_fingerprint(folder, held), LAYOUT_NAME, layout)
    host_slots = num_blocks_for(layout, settings.host_kv_bytes)
    name = settings.served_model_name or folder.name
    return LoadedModel(name, config, fmt, kv_cache, runner, max_model_len, host_slots, rates)


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
