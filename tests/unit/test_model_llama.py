"""The reference model equals transformers, however a prompt is cut into steps and whoever shares its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.batch import ScheduledSequence, build_batch
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.config import load_model_config
from common.model.llama import LlamaModel
from common.model.loader import load_model
from common.model.rope import inverse_frequencies
from common.sampling_params import SamplingParams
from tests.tiny_model import make_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PROMPT = torch.randint(3, 300, (45,), generator=torch.Generator().manual_seed(3)).tolist()


def new_cache(model: LlamaModel, num_blocks: int = 64) -> KvCache:
    config = model.config
    dtype = str(model.dtype).removeprefix("torch.")
    layout = KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
    return KvCache(layout, num_blocks, CPU)


def table(num_tokens: int, blocks: Sequence[int]) -> list[int]:
    return list(blocks[: -(-num_tokens // BLOCK_SIZE)])


def forward(model: LlamaModel, cache: KvCache, *scheduled: ScheduledSequence) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward(build_batch(scheduled, BLOCK_SIZE, CPU), cache)


def run_prompt(
    model: LlamaModel, cache: KvCache, prompt: list[int], blocks: Sequence[int], cuts: Sequence[int], start: int = 0
) -> torch.Tensor:
    """Logits [vocab] of the prompt's last token, the prompt computed from `start` in chunks that end at `cuts`."""
    logits = torch.empty(0)
    for end in (*cuts, len(prompt)):
        sampling = GREEDY if end == len(prompt) else None
        sequence = ScheduledSequence(prompt[start:end], start, table(end, blocks), sampling)
        logits = forward(model, cache, sequence)
        start = end
    return logits[0]


def oracle_logits(folder: Path, prompt: list[int], **kwargs: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, -1]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LlamaModel:
    return load_model(tiny_model_folder, torch.float32, CPU)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT[:BLOCK_SIZE], PROMPT[: BLOCK_SIZE + 1]])
def test_logits_equal_transformers(model: LlamaModel, tiny_model_folder: Path, prompt: list[int]) -> None:
    logits = run_prompt(model, new_cache(model), prompt, range(64), cuts=[])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, oracle_logits(tiny_model_folder, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
        MIXTRAL,
        {**MIXTRAL, "num_local_experts": 2, "num_experts_per_tok": 1, "tie_word_embeddings": True},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_variants_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = make_tiny_model(tmp_path, **overrides)
    model = load_model(folder, torch.float32, CPU)
    logits = run_prompt(model, new_cache(model), PROMPT, range(64), cuts=[20])
    torch.testing.assert_close(logits, oracle_logits(folder, PROMPT), rtol=1e-4, atol=1e-4)


def test_llama3_frequencies_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 99}
    folder = make_tiny_model(tmp_path, rope_theta=5e5, head_dim=64, rope_scaling={"rope_type": "llama3", **scaling})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder))
    torch.testing.assert_close(inverse_frequencies(load_model_config(folder)), expected)


@pytest.mark.parametrize("cuts", [[1], [44], [BLOCK_SIZE], [3, 4, 5, 21, 22], list(range(1, 45))])
def test_chunks_give_what_the_whole_prompt_gives(model: LlamaModel, cuts: list[int]) -> None:
    whole = run_prompt(model, new_cache(model), PROMPT, range(64), cuts=[])
    cut = run_prompt(model, new_cache(model), PROMPT, range(63, 0, -1), cuts=cuts)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)


def test_a_shared_prefix_serves_another_sequence(model: LlamaModel) -> None:
    cache = new_cache(model)
    run_prompt(model, cache, PROMPT, range(20), cuts=[])
    other = [*PROMPT[:24], *PROMPT[:10]]
    before = cache.data[:, :6].clone()
    reused = run_prompt(model, cache, other, [*range(6), *range(30, 50)], cuts=[], start=24)
    assert torch.equal(cache.data[:, :6], before)
    torch.testing.assert_close(reused, run_prompt(model, new_cache(model), other, range(20), []), rtol=1e-4, atol=1e-4)


def test_a_mixed_step_gives_each_sequence_what_it_gets_alone(model: LlamaModel) -> None:
    """Two chunks, of which one doesn't sample, and two decodes in one step."""
    sequences = [
        ScheduledSequence(PROMPT[:17], 0, table(17, range(10)), GREEDY),
        ScheduledSequence(PROMPT[9:10], 9, table(10, range(10, 20)), GREEDY),
        ScheduledSequence(PROMPT[5:12], 5, table(12, range(20, 30)), None),
        ScheduledSequence(PROMPT[33:34], 33, table(34, range(30, 40)), GREEDY),
    ]
    cache = new_cache(model)
    for sequence in sequences:
        if sequence.start:
            run_prompt(model, cache, PROMPT[: sequence.start], sequence.block_table, [])
    alone_cache = new_cache(model)
    alone_cache.data.copy_(cache.data)
    alone = torch.cat([forward(model, alone_cache, sequence) for sequence in sequences])
    together = forward(model, cache, *sequences)
    assert together.shape == (3, 300)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache.data, alone_cache.data, rtol=1e-4, atol=1e-4)


def test_a_step_that_samples_nothing_gives_no_rows(model: LlamaModel) -> None:
    assert forward(model, new_cache(model), ScheduledSequence(PROMPT[:5], 0, [0, 1])).shape == (0, 300)


def test_bfloat16_stays_near_float32(tiny_model_folder: Path, model: LlamaModel) -> None:
    rounded = load_model(tiny_model_folder, torch.bfloat16, CPU)
    logits = run_prompt(rounded, new_cache(rounded), PROMPT, range(64), cuts=[20])
    expected = run_prompt(model, new_cache(model), PROMPT, range(64), cuts=[20])
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=0) > 0.99
