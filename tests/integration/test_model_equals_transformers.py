"""On the real model, in float32, the engine's greedy tokens are those of transformers' generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.engine.batch import ScheduledSequence
from common.engine.model_runner import ModelRunner
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.loader import load_model
from common.model.tokenizer import Tokenizer
from common.sampling_params import SamplingParams
from tests.e2e.oracle import CJK, CODE, EMOJI, PROSE, Oracle

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine threads that wait for each other at every operation are many times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner(model_folder: Path) -> ModelRunner:
    cpu = torch.device("cpu")
    model = load_model(model_folder, torch.float32, cpu)
    config = model.config
    layout = KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, "float32")
    return ModelRunner(model, KvCache(layout, 500, cpu))


@pytest.fixture(scope="module")
def oracle(model_folder: Path) -> Oracle:
    return Oracle(model_folder)


def generate(
    runner: ModelRunner, prompt: list[int], blocks: list[int], count: int, *, chunk: int = 1024, start: int = 0
) -> list[int]:
    """Greedy tokens; the prompt is computed from `start` on, `chunk` tokens a step."""
    tokens: list[int] = []
    context = list(prompt)
    while len(tokens) < count:
        end = min(start + chunk, len(context))
        table = blocks[: -(-end // BLOCK_SIZE)]
        sampling = GREEDY if end == len(context) else None
        (token,) = runner.execute(
            [ScheduledSequence(context[start:end], start, table, sampling, len(tokens))]
        ).token_ids
        start = end
        if token is not None:
            tokens.append(token)
            context.append(token)
    return tokens


@pytest.mark.parametrize(
    "text", ["The capital of France is", PROSE, CODE, CJK, EMOJI], ids=["one line", "prose", "code", "cjk", "emoji"]
)
def test_tokens_of_short_prompts_are_those_of_transformers(runner: ModelRunner, oracle: Oracle, text: str) -> None:
    prompt = oracle.encode(text)
    expected = oracle.generate(prompt, 16)
    assert generate(runner, prompt, list(range(60)), len(expected), chunk=50) == expected


def test_a_prompt_of_3000_tokens_in_chunks_and_with_a_reused_prefix(runner: ModelRunner, oracle: Oracle) -> None:
    prompt = oracle.encode("".join(f"Chapter {n}. {PROSE}{CODE}" for n in range(40)))[:3001]
    expected = oracle.generate(prompt, 4)
    blocks = list(range(400, 100, -1))
    assert generate(runner, prompt, blocks, len(expected), chunk=700) == expected
    reused = 180
    other_blocks = [*blocks[:reused], *range(401, 480)]
    again = generate(runner, prompt, other_blocks, len(expected), start=reused * BLOCK_SIZE)
    assert again == expected


def test_the_tokenizer_is_the_one_transformers_loads(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer(model_folder), AutoTokenizer.from_pretrained(model_folder)
    for text in (PROSE, CODE, CJK, EMOJI, "in 2024: 1234567 + 89 = 1234656", "<|im_start|>user\n"):
        token_ids = ours.encode(text, add_special_tokens=False)
        assert token_ids == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(token_ids, skip_special_tokens=False) == text
    digits = ours.encode("1234567", add_special_tokens=False)
    assert len(digits) == 7
