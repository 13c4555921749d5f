"""What KV costs is measured on the machine itself, and said in powers of two."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from common.engine.model_runner import ModelRunner
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.config import load_model_config
from common.model.loader import load_model
from common.worker.calibration import attention_tokens, measure_rates


def test_rates_are_powers_of_two_of_what_was_measured(tiny_model_folder: Path) -> None:
    config = load_model_config(tiny_model_folder)
    cache = KvCache(
        KvLayout(config.num_layers, 8, config.num_kv_heads, config.head_dim, "float32"), 4, torch.device("cpu")
    )
    runner = ModelRunner(load_model(tiny_model_folder, torch.float32, torch.device("cpu")), cache)
    rates = measure_rates(runner, cache, config)
    assert all(value > 0 and value & (value - 1) == 0 for value in asdict(rates).values())
    assert rates.attention_tokens / 2 <= attention_tokens(config) <= rates.attention_tokens * 2
