"""What a request asks of the sampler, over the whole disaggregated path, against transformers on the same weights."""

from __future__ import annotations

import json
import math
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from baton.common.v1 import common_pb2
from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from common.sampling_params import choice_seed
from tests.e2e.conftest import Cluster, post, start_cluster
from tests.tiny_model import make_tiny_model

PROMPT = [17, 5, 99, 23, 42, 7, 150, 31, 200, 11, 64, 3, 88]
SAMPLED = {"temperature": 1.1, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Iterator[tuple[Cluster, Path]]:
    """One prefill and one decode worker with a model of two layers in float32, whose text is as good as random."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    settings = ["--set", f"kv_cache_bytes={16 << 20}", "--set", "max_choices=8"]
    for cluster in start_cluster(tmp_path_factory.mktemp("sampling"), folder, *settings):
        yield cluster, folder


@pytest.fixture(scope="module")
def oracle(tiny) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny[1], dtype=torch.float32).eval()


def complete(cluster: Cluster, **body) -> dict:
    asked = {"prompt": PROMPT, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True, **body}
    return post(f"{cluster.url}/v1/completions", asked)


def tokens_of(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def reference_logprobs(oracle, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids) - 1, vocab]: row i says what follows token i."""
    with torch.inference_mode():
        return oracle(torch.tensor([token_ids])).logits[0, :-1].double().log_softmax(-1)


def test_logprobs_are_transformers_whatever_penalties_and_temperature_do(tiny, oracle):
    answer = complete(tiny[0], logprobs=3, presence_penalty=0.7, logit_bias={"50": 3}, **SAMPLED)["choices"][0]
    told, output = answer["logprobs"], answer["token_ids"]
    expected = reference_logprobs(oracle, PROMPT + output)[len(PROMPT) - 1 :]
    own = [row[t].item() for row, t in zip(expected, output, strict=True)]
    assert told["token_logprobs"] == pytest.approx(own, abs=1e-3)
    for row, top in zip(expected, told["top_logprobs"], strict=True):
        best = row.topk(3).values.tolist()
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=1e-3)
    assert told["text_offset"][0] == 0
    assert all(math.isfinite(x) for x in told["token_logprobs"])


def test_prompt_logprobs_and_echo_are_transformers_and_no_cache_hides_them(tiny, oracle):
    prompt = PROMPT * 20  # more than one chunk, and cached by the second time
    expected = [row[t].item() for row, t in zip(reference_logprobs(oracle, prompt), prompt[1:], strict=True)]
    for _ in range(2):
        answer = complete(tiny[0], prompt=prompt, max_tokens=2, prompt_logprobs=2)["choices"][0]
        assert answer["prompt_logprobs"][0] is None
        told = [entry[str(t)]["logprob"] for entry, t in zip(answer["prompt_logprobs"][1:], prompt[1:], strict=True)]
        assert told == pytest.approx(expected, abs=1e-3)
    echoed = complete(tiny[0], prompt=prompt, max_tokens=2, echo=True, logprobs=0)["choices"][0]
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
    assert len(echoed["logprobs"]["tokens"]) == len(prompt) + 2
    assert len(echoed["text"]) > len(answer["text"])


def test_greedy_with_a_repetition_penalty_is_transformers(tiny, oracle):
    expected = oracle.generate(
        torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, repetition_penalty=1.4, eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    plain = tokens_of(complete(tiny[0], temperature=0))[0]
    assert tokens_of(complete(tiny[0], temperature=0, repetition_penalty=1.4))[0] == expected
    assert plain != expected


def test_bias_forces_and_bans_and_min_tokens_delays_the_end(tiny):
    cluster = tiny[0]
    assert tokens_of(complete(cluster, temperature=0, logit_bias={"77": 100}, max_tokens=3)) == [[77, 77, 77]]
    stop = {"temperature": 0, "logit_bias": {"77": 100}, "stop_token_ids": [77]}
    assert tokens_of(complete(cluster, **stop)) == [[77]]
    late = tokens_of(complete(cluster, min_tokens=5, **stop))[0]
    assert late.index(77) == 5
    assert len(late) == 6


@pytest.mark.parametrize("length", [13, 32, 100])
def test_each_of_n_choices_is_a_request_of_its_own_with_the_derived_seed(tiny, length):
    """Of prompts that end within a block and that fill it; with a penalty, whose state each has for itself."""
    cluster = tiny[0]
    body = {"prompt": (PROMPT * 8)[:length], "frequency_penalty": 0.5, **SAMPLED}
    together = complete(cluster, n=4, **body)
    alone = [tokens_of(complete(cluster, **{**body, "seed": choice_seed(11, j)}))[0] for j in range(4)]
    assert tokens_of(together) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert together["usage"]["prompt_tokens"] == length
    assert together["usage"]["completion_tokens"] == 64
    assert tokens_of(complete(cluster, n=4, **body)) == alone, "and again, with everything cached"


def test_choices_are_the_same_where_the_decode_worker_prefills_itself(tiny, tmp_path):
    body = {"n": 4, "frequency_penalty": 0.5, "logprobs": 1, "prompt_logprobs": 1, **SAMPLED}
    apart = complete(tiny[0], **body)["choices"]
    for local in start_cluster(tmp_path, tiny[1], "--prefill", "0", "--set", f"kv_cache_bytes={16 << 20}"):
        together = complete(local, **body)["choices"]
    assert [c["token_ids"] for c in together] == [c["token_ids"] for c in apart]
    for mine, theirs in zip(together, apart, strict=True):
        told, expected = mine["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"]
        assert told == pytest.approx(expected, abs=1e-3)
    assert [next(iter(e.values()))["logprob"] for e in together[0]["prompt_logprobs"][1:]] == pytest.approx(
        [next(iter(e.values()))["logprob"] for e in apart[0]["prompt_logprobs"][1:]], abs=1e-3
    )


def test_best_of_shows_the_likeliest_by_mean_logprob(tiny):
    cluster = tiny[0]
    made = complete(cluster, n=6, logprobs=0, **SAMPLED)["choices"]
    means = sorted((sum(c["logprobs"]["token_logprobs"]) / 16 for c in made), reverse=True)
    best = complete(cluster, n=2, best_of=6, logprobs=0, **SAMPLED)
    shown = [sum(c["logprobs"]["token_logprobs"]) / 16 for c in best["choices"]]
    assert shown == pytest.approx(means[:2], abs=1e-4)
    assert best["usage"]["completion_tokens"] == 96
    assert complete(cluster, best_of=3, **SAMPLED)["choices"][0]["logprobs"] is None


def test_n_choices_of_a_long_prompt_share_its_blocks(tiny):
    """As the decode worker's gauges tell while all of them run."""
    cluster = tiny[0]
    decode = next(w for w in cluster.workers() if w.role == "decode")
    prompt_blocks, own_blocks = 400 // decode.block_size, 100 // decode.block_size + 2

    def used_blocks() -> float:
        gauges = cluster.gauges(decode.metrics_url)
        return next(v for k, v in gauges.items() if k.startswith("baton_kv_blocks") and 'state="used"' in k)

    with ThreadPoolExecutor(1) as pool:
        seen: list[float] = []
        for _ in range(20):  # a request takes a moment, in which the gauges must be looked at
            running = pool.submit(complete, cluster, prompt=(PROMPT * 40)[:400], max_tokens=100, n=8, seed=3)
            while not running.done():
                seen.append(used_blocks())
            assert len(running.result()["choices"]) == 8
            if max(seen) > prompt_blocks:
                break
    assert prompt_blocks < max(seen) <= prompt_blocks + 8 * own_blocks, "eight prompts alone would be 200"


def test_the_sdk_reads_chat_logprobs_and_choices(tiny):
    cluster = tiny[0]
    question = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
        asked = {"model": client.models.list().data[0].id, "messages": question, "max_tokens": 6, "seed": 5}
        whole = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=4)
        assert [c.index for c in whole.choices] == [0, 1]
        for choice in whole.choices:
            content = choice.logprobs.content
            assert len(content) <= 6
            assert all(len(entry.top_logprobs) == 4 for entry in content)
            assert all(bytes(entry.bytes).decode(errors="replace") == entry.token for entry in content)
        chunks = list(client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=4, stream=True))
        streamed = [[], []]
        for chunk in chunks:
            for choice in chunk.choices:
                if choice.logprobs:
                    streamed[choice.index] += choice.logprobs.content
        assert streamed == [choice.logprobs.content for choice in whole.choices]


def test_a_stop_string_may_stay_in_the_text_and_counts_only_after_min_tokens(tiny):
    cluster = tiny[0]
    text = complete(cluster, temperature=0, max_tokens=24)["choices"][0]["text"]
    stop = next(c for c in text[4:] if c.isprintable() and c != "\ufffd")
    first = text.index(stop)
    cut = complete(cluster, temperature=0, max_tokens=24, stop=stop)["choices"][0]
    kept = complete(cluster, temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert (cut["text"], kept["text"]) == (text[:first], text[: first + 1])
    assert cut["finish_reason"] == kept["finish_reason"] == "stop"
    late = complete(cluster, temperature=0, max_tokens=24, stop=stop, min_tokens=23)["choices"][0]
    assert len(late["token_ids"]) == 24


async def test_grpc_tells_the_same_as_http(tiny):
    cluster = tiny[0]
    http = complete(cluster, n=2, logprobs=2, **SAMPLED)["choices"]
    sampling = inference_pb2.SamplingParams(
        max_tokens=16, ignore_eos=True, n=2, logprobs=2, prompt_logprobs=0, temperature=1.1, top_p=0.95, seed=11
    )
    start = inference_pb2.StartGeneration(
        request_id="r", tokens=inference_pb2.TokenPrompt(token_ids=PROMPT), sampling=sampling
    )
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate()
        await call.write(inference_pb2.GenerateRequest(start=start))
        await call.done_writing()
        frames = [frame async for frame in call]
    chunks = [f.chunk for f in frames if f.HasField("chunk")]
    for index, choice in enumerate(http):
        own = [c for c in chunks if c.index == index]
        assert [t for c in own for t in c.token_ids] == choice["token_ids"]
        told = [each.logprob for c in own for each in c.logprobs]
        assert told == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert own[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert [each.token_id for c in chunks for each in c.prompt_logprobs] == PROMPT[1:]
    assert frames[-1].finished.usage.prompt_tokens == len(PROMPT)
    assert frames[-1].finished.usage.completion_tokens == 32


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 9}, "n"),
        ({"n": 10**30}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 1e300}, "presence_penalty"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(tiny, fields, param):
    with pytest.raises(urllib.error.HTTPError) as caught:
        complete(tiny[0], **fields)
    assert caught.value.code == 400
    assert json.loads(caught.value.read())["error"]["param"] == param


def test_the_real_models_logprobs_are_transformers(cluster, model_folder):
    """Greedy and sampled, of prompt and output, in float32."""
    name = cluster.workers()[0].model_name
    body = {"model": name, "prompt": "The lighthouse keeper counted the ships each evening", "max_tokens": 12}
    asked = {**body, "logprobs": 5, "prompt_logprobs": 0, "return_token_ids": True, "temperature": 0.8, "seed": 4}
    answer = post(f"{cluster.url}/v1/completions", asked)["choices"][0]
    prompt = [int(next(iter(entry))) for entry in answer["prompt_logprobs"][1:]]
    told = [next(iter(entry.values()))["logprob"] for entry in answer["prompt_logprobs"][1:]]
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokens = [*tokenizer.encode(body["prompt"]).ids, *answer["token_ids"]]
    assert tokens[1 : len(prompt) + 1] == prompt
    torch.set_num_threads(1)
    expected = reference_logprobs(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32), tokens)
    own = [row[t].item() for row, t in zip(expected, tokens[1:], strict=True)]
    assert told + answer["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-3)
    for row, top in zip(expected[len(prompt) :], answer["logprobs"]["top_logprobs"], strict=True):
        assert sorted(top.values(), reverse=True)[:5] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
