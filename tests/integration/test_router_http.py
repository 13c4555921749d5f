"""The OpenAI face over a real socket, before mock workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from common.model.tokenizer import Tokenizer
from tests.fakes.mock_worker import Failure, scripted_token
from tests.fakes.router_cluster import MockCluster, mock_cluster, streamed
from tests.fakes.tiny_folder import EOS_ID, MAX_MODEL_LEN, VOCAB_SIZE, make_tiny_folder

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer(folder)


def letters(prompt, index: int) -> int:
    """A script whose tokens are all printable: "abcdefghij…", by output index."""
    return LETTERS[index % 26]


# Filled from the tokenizer: token ids of "a" to "z".
LETTERS: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def _letters(tokenizer):
    LETTERS[:] = [tokenizer.encode(chr(ord("a") + i), False)[0] for i in range(26)]


async def test_streamed_and_whole_answers_agree_with_the_script(folder, tokenizer):
    async with mock_cluster(folder, cached_tokens=2) as cluster:
        prompt = tokenizer.encode("hello", True)
        wanted = [scripted_token(prompt, i) for i in range(8)]
        whole = await cluster.complete(max_tokens=8, return_token_ids=True)
        assert whole["choices"][0]["token_ids"] == wanted
        assert whole["choices"][0]["text"] == tokenizer.decode(wanted)
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 8,
            "total_tokens": len(prompt) + 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        options = {"include_usage": True}
        async with streamed(cluster, max_tokens=8, return_token_ids=True, stream_options=options) as events:
            await events.rest()
        assert events.done
        assert (events.token_ids, events.text) == (wanted, tokenizer.decode(wanted))
        assert events.finish_reasons == ["length"]
        assert [event["usage"] for event in events.events] == [None] * (len(events.events) - 1) + [whole["usage"]]
        assert events.events[-1]["choices"] == []
        async with streamed(cluster, prompt=prompt, max_tokens=8) as events:
            await events.rest()
        assert events.text == tokenizer.decode(wanted)
        assert all("usage" not in event and "token_ids" not in event["choices"][0] for event in events.events)
        cluster.assert_nothing_left()


async def test_an_end_of_sequence_token_counts_but_has_no_text(folder, tokenizer):
    def script(prompt, index):
        return EOS_ID if index == 3 else LETTERS[index]

    async with mock_cluster(folder, script=script) as cluster:
        answer = await cluster.complete(max_tokens=50, return_token_ids=True)
        assert answer["choices"][0] == {
            "index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "token_ids": [*LETTERS[:3], EOS_ID],
        }  # fmt: skip
        assert answer["usage"]["completion_tokens"] == 4
        answer = await cluster.complete(max_tokens=5, ignore_eos=True)
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abce", "length")


async def test_a_stop_string_never_leaks_and_frees_both_workers(folder):
    async with mock_cluster(folder, script=letters) as cluster:
        whole = await cluster.complete(max_tokens=26, stop=["xyz", "efgh"], return_token_ids=True)
        assert whole["choices"][0]["text"] == "abcd"
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["choices"][0]["token_ids"] == LETTERS[:8]
        assert whole["usage"]["completion_tokens"] == 8
        async with streamed(cluster, max_tokens=26, stop="efgh") as events:
            await events.rest()
        assert (events.text, events.finish_reasons, events.done) == ("abcd", ["stop"], True)
        await cluster.decodes[0].until(lambda: not cluster.decodes[0].live)
        cluster.assert_nothing_left()


async def test_several_prompts_give_one_choice_each(folder, tokenizer):
    async with mock_cluster(folder) as cluster:
        prompts = ["one", "two two", "three"]
        wanted = [tokenizer.decode([scripted_token(tokenizer.encode(p, True), i) for i in range(4)]) for p in prompts]
        whole = await cluster.complete(prompt=prompts, max_tokens=4)
        assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate(wanted))
        assert whole["usage"]["completion_tokens"] == 12
        ids = [tokenizer.encode(p, True) for p in prompts]
        async with streamed(cluster, prompt=ids, max_tokens=4) as events:
            await events.rest()
        for index, text in enumerate(wanted):
            pieces = [c["text"] for e in events.events for c in e["choices"] if c["index"] == index]
            assert "".join(pieces) == text
        assert events.finish_reasons == ["length"] * 3
        cluster.assert_nothing_left()


async def test_the_openai_sdk_works_against_it(folder):
    async with mock_cluster(folder, script=letters) as cluster, sdk_for(cluster) as sdk:
        model = (await sdk.models.list()).data[0].id
        assert model == "tiny"
        assert (await sdk.models.retrieve(model)).id == model
        whole = await sdk.chat.completions.create(model=model, messages=CHAT, max_tokens=5)
        assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", "abcde")
        stream = await sdk.chat.completions.create(
            model=model, messages=CHAT, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abcde"
        assert chunks[-1].usage == whole.usage
        assert all(chunk.usage is None for chunk in chunks[:-1])
        text = await sdk.completions.create(model=model, prompt="x", max_tokens=3)
        assert text.choices[0].text == "abc"


async def test_the_openai_sdk_raises_its_typed_errors(folder):
    async with mock_cluster(folder, script=letters) as cluster, sdk_for(cluster) as sdk:
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.models.retrieve("nope")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="maximum context length is"):
            await sdk.completions.create(model="tiny", prompt=[5] * MAX_MODEL_LEN, max_tokens=5)
        cluster.decodes[0].steps.close()
        stream = await sdk.completions.create(model="tiny", prompt="x", max_tokens=9, stream=True)
        await anext(stream)
        cluster.decodes[0].failures.append(Failure("INTERNAL"))
        cluster.decodes[0].steps.open()
        with pytest.raises(openai.APIError, match="as the test asked"):
            await anext(stream)


def sdk_for(cluster: MockCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.router.http_url}/v1", api_key="x", max_retries=0)


BAD = [
    ("completions", {}, 400, "prompt", "invalid_request"),
    ("completions", {"prompt": ""}, 400, "prompt", "invalid_request"),
    ("completions", {"prompt": ["a", ""]}, 400, "prompt[1]", "invalid_request"),
    ("completions", {"prompt": [VOCAB_SIZE]}, 400, "prompt", "invalid_request"),
    ("completions", {"prompt": [5] * MAX_MODEL_LEN}, 400, "prompt", "context_length_exceeded"),
    ("completions", {"prompt": "a", "max_tokens": 10**7}, 400, "max_tokens", "context_length_exceeded"),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "invalid_request"),
    ("completions", {"prompt": "a", "temperature": 9}, 400, "temperature", "invalid_request"),
    ("completions", {"prompt": "a", "model": "nope"}, 404, "model", "model_not_found"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "invalid_request"),
    ("completions", {"prompt": "a", "n": 17}, 400, "n", "invalid_request"),
    ("completions", {"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", "invalid_request"),
    ("completions", {"prompt": "a", "logit_bias": {"300": 1}}, 400, "logit_bias", "invalid_request"),
    ("completions", {"prompt": ["a"] * 129}, 400, "prompt", "invalid_request"),
    ("completions", {"prompt": "a", "timeout": 0}, 400, "timeout", "invalid_request"),
    ("chat/completions", {"messages": []}, 400, "messages", "invalid_request"),
    ("chat/completions", {"messages": CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens",
     "invalid_request"),
    ("chat/completions", {"messages": CHAT, "tools": [{}]}, 400, "tools", "invalid_request"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a" * 4000}]}, 400, "messages",
     "context_length_exceeded"),
]  # fmt: skip


async def test_every_error_has_openais_body_status_and_names_the_field(folder):
    async with mock_cluster(folder) as cluster:
        for stream in (False, True):
            for path, body, status, param, code in BAD:
                response = await cluster.http.post(f"/v1/{path}", json={**body, "stream": stream})
                assert response.status_code == status, (path, body, response.text)
                error = response.json()["error"]
                assert (error["param"], error["code"]) == (param, code), (path, body)
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error"
                assert "\n" not in error["message"]
                assert response.headers["x-request-id"]
        assert all(worker.seen == [] for worker in cluster.workers), "users' errors end in the gateway"
        metrics = (await cluster.http.get("/metrics")).text
        assert 'baton_requests_total{outcome="model_not_found"} 2.0' in metrics


async def test_broken_bodies_unknown_routes_and_methods_are_errors_of_the_same_form(folder):
    async with mock_cluster(folder) as cluster:
        http = cluster.http
        answers = [
            (await http.post("/v1/completions", content=b'{"prompt": '), 400, "invalid_request", "JSON"),
            (await http.post("/v1/completions", content=b"[]"), 400, "invalid_request", "JSON object"),
            (await http.post("/v1/completions", content=b" " * (16 << 20) + b"{}"), 400, "invalid_request", "larger"),
            (await http.post("/v1/nonsense", json={}), 404, "not_found", "/v1/nonsense"),
            (await http.get("/v1/completions"), 405, "method_not_allowed", "GET"),
            (
                await http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout": "soon"}),
                400, "invalid_request", "x-request-timeout",
            ),
        ]  # fmt: skip
        for response, status, code, words in answers:
            assert response.status_code == status
            error = response.json()["error"]
            assert (error["code"], words in error["message"]) == (code, True), error
            assert response.headers["x-request-id"]
        assert (await http.get("/v1/completions")).headers["allow"] == "POST"


async def test_request_ids_are_echoed_if_sane_and_made_if_not(folder):
    async with mock_cluster(folder) as cluster:
        body = {"prompt": "a", "max_tokens": 1}
        for given, echoed in (("abc-1.2:3", True), ("a b", False), ("x" * 200, False), ("", False)):
            response = await cluster.http.post("/v1/completions", json=body, headers={"x-request-id": given})
            assert (response.headers["x-request-id"] == given) == echoed
            assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


async def test_a_worker_that_is_away_a_passed_deadline_and_overload_have_their_statuses(folder):
    async with mock_cluster(folder, decode=0, settings={"max_waiting": 1}) as cluster:
        response = await cluster.http.post("/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert int(response.headers["retry-after"]) >= 1
        decode = await cluster.add_worker("decode")
        await cluster.connected(decode)
        decode.reservations.close()
        response = await cluster.http.post("/v1/completions", json={"prompt": "a", "timeout": 0.05, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        await decode.until(lambda: not decode.live)
        waiting = asyncio.create_task(cluster.complete(max_tokens=2))
        await decode.until(lambda: decode.live)
        response = await cluster.http.post("/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "1"
        decode.reservations.open()
        await waiting
        cluster.assert_nothing_left()
        await decode.kill()


async def test_a_failure_in_mid_stream_is_an_error_event_and_then_the_end(folder):
    async with mock_cluster(folder) as cluster:
        cluster.decodes[0].failures.append(Failure("INTERNAL", after_tokens=2))
        async with streamed(cluster, max_tokens=9, return_token_ids=True) as events:
            await events.rest()
        assert len(events.token_ids) == 3, "what came before the failure was shown"
        assert events.events[-1]["error"]["code"] == "internal_error"
        assert (events.done, events.finish_reasons) == (False, [])
        metrics = (await cluster.http.get("/metrics")).text
        assert 'baton_requests_total{outcome="internal_error"} 1.0' in metrics
        cluster.assert_nothing_left()


async def test_metrics_tell_what_happened_and_forget_workers_that_left(folder):
    async with mock_cluster(folder, cached_tokens=2) as cluster:
        await cluster.complete(max_tokens=5)
        page = (await cluster.http.get("/metrics")).text
        for line in (
            "baton_requests_running 0.0",
            "baton_requests_waiting 0.0",
            'baton_queue_requests{priority_class="default"} 0.0',
            'baton_requests_total{outcome="length"} 1.0',
            "baton_generation_tokens_total 5.0",
            "baton_prefix_cache_hits_total 2.0",
            "baton_transfer_bytes_total 4096.0",
            "baton_time_to_first_token_seconds_count 1.0",
            "baton_request_decode_seconds_count 1.0",
            'baton_workers{role="decode",state="ready"} 1.0',
        ):
            assert line in page.splitlines(), line
        assert 'worker_id="decode-0"' in page
        await cluster.decodes[0].unregister(cluster.redis, "test")
        await cluster.decodes[0].kill()
        await cluster.until(lambda: not cluster.router.fleet.sessions("decode"), "the worker to be forgotten")
        assert "decode-0" not in (await cluster.http.get("/metrics")).text


async def test_the_openapi_page_describes_the_bodies(folder):
    async with mock_cluster(folder) as cluster:
        page = json.loads((await cluster.http.get("/openapi.json")).content)
        schema = page["components"]["schemas"]["ChatBody"]["properties"]
        assert {"messages", "max_completion_tokens", "stop"} <= set(schema)
        assert page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["required"] is True


async def test_choices_are_numbered_streamed_side_by_side_and_count_their_prompt_once(folder):
    async with mock_cluster(folder) as cluster:
        one = await cluster.complete(prompt=["hello", "there"], max_tokens=5)
        whole = await cluster.complete(prompt=["hello", "there"], max_tokens=5, n=3)
        assert [c["index"] for c in whole["choices"]] == list(range(6))
        texts = [c["text"] for c in one["choices"]]
        assert [c["text"] for c in whole["choices"]] == [texts[0]] * 3 + [texts[1]] * 3
        assert whole["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
        assert whole["usage"]["completion_tokens"] == 30
        assert [len(spec.forks) for spec in cluster.prefills[0].seen] == [0, 0, 2, 2], "one prefill a prompt"
        async with streamed(cluster, max_tokens=5, n=3, stream_options={"include_usage": True}) as events:
            await events.rest()
        assert events.done
        by_index = dict.fromkeys(range(3), "")
        for event in events.events:
            for choice in event["choices"]:
                by_index[choice["index"]] += choice["text"]
        assert by_index == dict.fromkeys(range(3), texts[0])
        assert len(events.finish_reasons) == 3
        assert events.events[-1]["usage"]["completion_tokens"] == 15
        cluster.assert_nothing_left()


async def test_a_client_that_leaves_ends_all_its_choices(folder):
    async with mock_cluster(folder) as cluster:
        cluster.decodes[0].steps.close()
        async with streamed(cluster, max_tokens=50, n=3, return_token_ids=True) as events:
            await events.next()
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the end of all choices")
        await cluster.decodes[0].until(lambda: not cluster.decodes[0].live)
        await cluster.prefills[0].until(lambda: not cluster.prefills[0].live)
        cluster.assert_nothing_left()
