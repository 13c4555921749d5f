"""The runner gives each sampling sequence its own token, and keeps (seed, output index) apart from batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.batch import ScheduledSequence
from common.engine.model_runner import ModelRunner
from common.kernels.cpu.build import NativeUnavailableError
from common.kernels.cpu.loader import load_native_model
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.interface import Model
from common.model.llama import LlamaModel
from common.model.loader import load_model
from common.sampling_params import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
PROMPT = [5, 90, 17, 203, 44, 8, 131]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LlamaModel:
    return load_model(tiny_model_folder, torch.float32, CPU)


def native_model(folder: Path) -> Model:
    try:
        return load_native_model(folder, torch.float32, 2)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def new_cache(model: Model, num_blocks: int = 40) -> KvCache:
    config = model.config
    layout = KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, "float32")
    return KvCache(layout, num_blocks, CPU)


def new_runner(model: Model, num_blocks: int = 40) -> ModelRunner:
    return ModelRunner(model, new_cache(model, num_blocks))


def generate(runner: ModelRunner, prompt: list[int], blocks: range, sampling: SamplingParams, count: int) -> list[int]:
    tokens: list[int] = []
    for i in range(count):
        ids = prompt if i == 0 else tokens[-1:]
        start = 0 if i == 0 else len(prompt) + i - 1
        table = list(blocks)[: -(-(start + len(ids)) // BLOCK_SIZE)]
        (token,) = runner.execute([ScheduledSequence(ids, start, table, sampling, i)]).token_ids
        assert token is not None
        tokens.append(token)
    return tokens


def test_greedy_text_is_that_of_transformers(model: LlamaModel, tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = oracle.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert generate(new_runner(model), PROMPT, range(40), GREEDY, 30) == expected


def test_only_sequences_that_sample_get_a_token_and_in_their_order(model: LlamaModel) -> None:
    alone = generate(new_runner(model), PROMPT, range(40), GREEDY, 1)[0]
    tokens = (
        new_runner(model)
        .execute(
            [
                ScheduledSequence(PROMPT[:3], 0, [0], None),
                ScheduledSequence(PROMPT, 0, [1, 2], GREEDY),
                ScheduledSequence(PROMPT[3:], 0, [3], None),
                ScheduledSequence([PROMPT[0]], 0, [4], GREEDY),
            ]
        )
        .token_ids
    )
    assert tokens[:3] == [None, alone, None]
    assert tokens[3] == generate(new_runner(model), PROMPT[:1], range(40), GREEDY, 1)[0]


def test_sampled_text_depends_on_seed_and_position_alone(model: LlamaModel) -> None:
    """The continuation by another runner, after a replay of prompt and output, is the text of an undisturbed run."""
    sampling = SamplingParams(max_tokens=9, temperature=1.3, top_p=0.95, seed=77)
    undisturbed = generate(new_runner(model), PROMPT, range(40), sampling, 8)
    replayed = [*PROMPT, *undisturbed[:5]]
    elsewhere = new_runner(model)
    table = [9, 3, 20]
    bystander = ScheduledSequence(PROMPT[2:], 0, [30, 31], SamplingParams(max_tokens=9, seed=1))
    tokens = elsewhere.execute([bystander, ScheduledSequence(replayed, 0, table, sampling, 5)]).token_ids
    assert tokens[1] == undisturbed[5]
    assert undisturbed != generate(new_runner(model), PROMPT, range(40), SamplingParams(9, seed=78), 8)


def test_a_greedy_token_is_the_same_beside_one_that_is_drawn(tiny_model_folder: Path) -> None:
    """The native executor finds it where all are greedy, the sampler where one is not."""
    model = native_model(tiny_model_folder)
    drawn = ScheduledSequence(PROMPT[2:], 0, [30, 31], SamplingParams(max_tokens=9, seed=1))
    for length in range(1, len(PROMPT) + 1):
        greedy = ScheduledSequence(PROMPT[:length], 0, [0, 1], GREEDY)
        alone, beside = (new_runner(model).execute(step).token_ids for step in ([greedy], [greedy, drawn]))
        assert alone == beside[:1]


def test_greedy_logits_that_are_not_finite_fail_their_own_sequence_only(tiny_model_folder: Path) -> None:
    model = native_model(tiny_model_folder)
    cache = new_cache(model)
    cache.data.fill_(float("nan"))
    damaged, whole = ScheduledSequence([5], 4, [0, 1], GREEDY), ScheduledSequence(PROMPT, 0, [2, 3], GREEDY)
    result = ModelRunner(model, cache).execute([damaged, whole])
    assert result.token_ids == [None, *new_runner(model).execute([whole]).token_ids]
    assert list(result.extras) == [0]


def test_an_empty_step_gives_nothing(model: LlamaModel) -> None:
    assert new_runner(model).execute([]).token_ids == []


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(8, 40), (10**6, 40), (10**6, 1), (0, 40)])
def test_warm_up_fits_into_any_cache(model: LlamaModel, num_tokens: int, num_blocks: int) -> None:
    runner = new_runner(model, num_blocks)
    runner.warm_up(num_tokens)
    if num_blocks > 1:
        assert generate(runner, PROMPT, range(40), GREEDY, 3) == generate(
            new_runner(model), PROMPT, range(40), GREEDY, 3
        )


def test_a_cache_of_another_dtype_is_refused(model: LlamaModel) -> None:
    cache = KvCache(KvLayout(2, BLOCK_SIZE, 2, 16, "bfloat16"), 4, CPU)
    with pytest.raises(ValueError, match="bfloat16"):
        ModelRunner(model, cache)
