"""What KV costs on this machine, measured once, right after the warm-up: see common/engine/cost_rates.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from common.engine.batch import ScheduledSequence
from common.engine.cost_rates import CostRates, quantised_ns
from common.engine.model_runner import ModelRunner
from common.kvcache.interface import KvPool
from common.model.config import ModelConfig
from common.sampling_params import SamplingParams

CHUNK_TOKENS: Final = 64
REPEATS: Final = 3


def measure_rates(runner: ModelRunner, kv_cache: KvPool, config: ModelConfig) -> CostRates:
    """A few steps and copies, the least of each. Overwrites the first blocks of the cache: before any is in use."""
    block_size = kv_cache.layout.block_size
    num_tokens = max(1, min(CHUNK_TOKENS, kv_cache.num_blocks * block_size, config.max_position_embeddings) - 1)
    table = range(-(-(num_tokens + 1) // block_size))
    sampling = SamplingParams(max_tokens=1)
    chunk = ScheduledSequence([0] * num_tokens, 0, table[: -(-num_tokens // block_size)], sampling)
    decode = ScheduledSequence([0], num_tokens - 1, chunk.block_table, sampling)
    layout = kv_cache.layout
    bytes_of_block = np.empty(layout.num_layers * layout.block_bytes, dtype=np.uint8)
    return CostRates(
        token_ns=quantised_ns(_least_s(lambda: runner.execute([chunk])) / num_tokens),
        attention_tokens=1 << max(0, round(np.log2(attention_tokens(config)))),
        block_copy_ns=quantised_ns(_least_s(lambda: kv_cache.gather(0, layout.num_layers, [0], bytes_of_block))),
        step_ns=quantised_ns(_least_s(lambda: runner.execute([decode]))),
    )


def attention_tokens(config: ModelConfig) -> float:
    """Context with which a token's attention multiplies as often as all its matrices do (the output head excepted)."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    weights = attention + 3 * config.hidden_size * config.intermediate_size
    return max(1.0, weights / (2 * config.q_size))


def _least_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
