"""Over the whole disaggregated path, greedy float32 tokens are those of transformers on the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Cluster, post
from tests.e2e.oracle import Oracle

MAX_TOKENS = 12


@pytest.fixture(scope="session")
def oracle(model_folder) -> Oracle:
    return Oracle(model_folder)


def complete(cluster: Cluster, token_ids: list[int], max_tokens: int = MAX_TOKENS, **extra) -> tuple[list[int], dict]:
    body = {"prompt": token_ids, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **extra}
    answer = post(f"{cluster.url}/v1/completions", {"model": cluster_model(cluster), **body})
    return answer["choices"][0]["token_ids"], answer["usage"]


def cluster_model(cluster: Cluster) -> str:
    return cluster.workers()[0].model_name


def mismatches(cluster: Cluster, oracle: Oracle, prompts: dict[str, list[int]], at_once: int = 1) -> dict[str, tuple]:
    with ThreadPoolExecutor(at_once) as pool:
        answers = dict(zip(prompts, pool.map(lambda ids: complete(cluster, ids)[0], prompts.values()), strict=True))
    wanted = {name: oracle.generate(ids, MAX_TOKENS) for name, ids in prompts.items()}
    return {name: (answers[name], wanted[name]) for name in prompts if answers[name] != wanted[name]}


def test_cold_tokens_equal_transformers_for_every_kind_of_prompt(cluster, oracle):
    prompts = oracle.prompts()
    assert len(prompts) >= 30
    assert {len(ids) for ids in prompts.values()} >= {1, 15, 16, 17, 3000}
    assert mismatches(cluster, oracle, prompts) == {}


def test_full_prefix_hits_change_no_token(cluster, oracle):
    prompts = {k: v for k, v in oracle.prompts().items() if k in ("prose-256", "prose-257", "code-2049", "cjk-long")}
    for ids in prompts.values():
        complete(cluster, ids)
    for name, ids in prompts.items():
        tokens, usage = complete(cluster, ids)
        assert tokens == oracle.generate(ids, MAX_TOKENS), name
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(ids) - 1) // 16 * 16, f"{name}: the last token is always computed, the rest is cached"


def test_partial_prefix_hits_change_no_token(cluster, oracle):
    prose = oracle.prompts()["prose-1024"]
    complete(cluster, prose)
    for length in (100, 512, 1000):
        ids = prose[:length] + oracle.encode(" In the end, he decided")
        tokens, usage = complete(cluster, ids)
        assert tokens == oracle.generate(ids, MAX_TOKENS)
        assert usage["prompt_tokens_details"]["cached_tokens"] == length // 16 * 16


def test_a_second_turn_finds_the_first_answer_in_the_decode_cache(cluster, oracle):
    """The blocks that decoding filled are reused, and the continuation is still transformers'."""
    first = oracle.chat("Name the planets of the solar system.")
    answer, _ = complete(cluster, first, max_tokens=40)
    second = first + answer + oracle.encode("<|im_end|>\n<|im_start|>user\nWhich is the largest?<|im_end|>\n")
    tokens, _ = complete(cluster, second)
    assert tokens == oracle.generate(second, MAX_TOKENS)


def test_eight_at_once_equal_each_alone(cluster, oracle):
    prompts = oracle.prompts()
    names = ["prose-17", "code-511", "cjk", "emoji", "question-1", "prose-255", "code-64", "question-4"]
    # A salt of its own makes the run cold: no block is shared with earlier tests.
    fresh = {name: oracle.encode("Note 8. ") + prompts[name] for name in names}
    assert mismatches(cluster, oracle, fresh, at_once=8) == {}
    assert mismatches(cluster, oracle, fresh, at_once=8) == {}, "and again, warm"


def test_two_prefill_and_two_decode_workers_give_the_same_answers(cluster_2p2d, oracle):
    prompts = oracle.prompts()
    assert mismatches(cluster_2p2d, oracle, prompts, at_once=4) == {}
    assert {w.role for w in cluster_2p2d.workers()} == {"prefill", "decode"}
    assert len(cluster_2p2d.workers()) == 4


def test_sampled_tokens_depend_on_the_seed_and_not_on_company(cluster, oracle):
    ids = oracle.chat("Tell me a story about a fox.")
    sampling = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 7}
    alone, _ = complete(cluster, ids, 24, **sampling)
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(lambda _: complete(cluster, ids, 24, **sampling)[0], range(4)))
        others = list(pool.map(lambda s: complete(cluster, ids, 24, **{**sampling, "seed": s})[0], range(100, 104)))
    assert crowd == [alone] * 4
    assert len({tuple(tokens) for tokens in others}) > 1
