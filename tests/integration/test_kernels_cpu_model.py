"""On the real model the native executor decodes what transformers decodes in float32, and rounds less in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.batch import ScheduledSequence, build_batch
from common.kernels.cpu.loader import load_native_model
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.interface import Model
from common.model.loader import load_model
from common.sampling_params import SamplingParams
from tests.e2e.oracle import PROSE, Oracle

CPU = torch.device("cpu")
BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
PROMPTS = ("prose-1", "prose-17", "prose-257", "question-0", "cjk-long", "emoji", "prose-1024")
NEW_TOKENS = 10


def new_cache(model: Model, num_blocks: int) -> KvCache:
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    return KvCache(
        KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype), num_blocks, CPU
    )


def last_logits(model: Model, cache: KvCache, token_ids: list[int], start: int, blocks: list[int]) -> torch.Tensor:
    table = blocks[: -(-(start + len(token_ids)) // BLOCK_SIZE)]
    with torch.inference_mode():
        return model.forward(
            build_batch([ScheduledSequence(token_ids, start, table, GREEDY)], BLOCK_SIZE, CPU), cache
        ).clone()[0]


@pytest.fixture(scope="module")
def oracle(model_folder: Path) -> Oracle:
    return Oracle(model_folder)


def test_greedy_float32_tokens_equal_transformers(model_folder: Path, oracle: Oracle) -> None:
    model = load_native_model(model_folder, torch.float32, num_threads=2)
    cache = new_cache(model, 200)
    blocks = list(range(199, -1, -1))
    prompts = oracle.prompts()
    for name in PROMPTS:
        tokens, start, context = [], 0, list(prompts[name])
        expected = oracle.generate(prompts[name], NEW_TOKENS)
        while len(tokens) < len(expected):
            logits = last_logits(model, cache, context[start:], start, blocks)
            start = len(context)
            tokens.append(int(logits.argmax()))
            context.append(tokens[-1])
        assert tokens == expected, name


def test_bfloat16_strays_less_from_float32_than_the_reference(model_folder: Path, oracle: Oracle) -> None:
    prompt = oracle.encode(PROSE * 4)
    divergence = {}
    exact = load_native_model(model_folder, torch.float32, num_threads=2)
    truth = last_logits(exact, new_cache(exact, 40), prompt, 0, list(range(40))).log_softmax(-1)
    for name, model in (
        ("native", load_native_model(model_folder, torch.bfloat16, num_threads=2)),
        ("reference", load_model(model_folder, torch.bfloat16, CPU)),
    ):
        logits = last_logits(model, new_cache(model, 40), prompt, 0, list(range(40)))
        divergence[name] = (truth.exp() * (truth - logits.log_softmax(-1))).sum().item()
    assert 0 < divergence["native"] <= max(divergence["reference"], 1e-3)
