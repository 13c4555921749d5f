"""OpenAI bodies: strict types, refusals that name the field, and no guessing."""

from __future__ import annotations

import json

import pytest

from common.errors import BatonError, ErrorKind
from router.gateway import openai_models
from router.gateway.openai_models import ChatBody, CompletionBody, parse_body
from router.gateway.prompts import TextPrompt, TokenPrompt

USER = {"role": "user", "content": "hi"}


def completion(**fields) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())


def chat(**fields) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": [USER], **fields}).encode())


def refused(function, **fields) -> BatonError:
    with pytest.raises(BatonError) as caught:
        function(**fields)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"prompt": ', b"\xff\xfe", b'{"prompt": "a"} x', b"nonsense", b'{"prompt": "\\ud800"}']
)
def test_broken_json_is_told_as_such(data):
    with pytest.raises(BatonError, match="not valid JSON"):
        parse_body(CompletionBody, data)


@pytest.mark.parametrize("data", [b"[]", b'"a"', b"5", b"null"])
def test_a_body_must_be_an_object(data):
    with pytest.raises(BatonError, match="must be a JSON object"):
        parse_body(CompletionBody, data)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
@pytest.mark.parametrize("body", [completion, chat])
def test_a_wrong_type_is_never_converted(body, fields, param):
    assert refused(body, **fields).param == param


@pytest.mark.parametrize(
    ("field", "asks", "neutral"),
    [
        ("tools", [{}], []), ("tool_choice", "required", "auto"),
        ("response_format", {"type": "json_object"}, {"type": "text"}), ("suffix", "x", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("body", [completion, chat])
def test_what_is_not_served_is_refused_and_its_neutral_value_is_not(body, field, asks, neutral):
    assert refused(body, **{field: asks}).param == field
    body(**{field: neutral})
    body(**{field: None})


def test_unknown_fields_are_ignored():
    completion(store=True, metadata={"a": "b"}, whatever=[1])


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", [TextPrompt("a")]),
        ([1, 2], [TokenPrompt([1, 2])]),
        (["a", ""], [TextPrompt("a"), TextPrompt("")]),
        ([[1], [2, 3]], [TokenPrompt([1]), TokenPrompt([2, 3])]),
    ],
)
def test_all_four_kinds_of_prompt_are_read(prompt, wanted):
    assert completion(prompt=prompt).prompts() == wanted


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (5, "prompt"), (None, "prompt"), ({}, "prompt"), ([], "prompt"), ([1, "a"], "prompt"), ([True], "prompt"),
        ([1.0], "prompt"), ([[1], []], "prompt[1]"), ([[1], ["a"]], "prompt[1]"), ([None], "prompt"),
    ],
)  # fmt: skip
def test_any_other_prompt_is_refused(prompt, param):
    assert refused(lambda: completion(prompt=prompt).prompts()).param == param


def test_a_missing_prompt_is_named():
    with pytest.raises(BatonError) as caught:
        parse_body(CompletionBody, b"{}")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([USER, {"content": "a"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    ],
)
def test_messages_are_refused_by_position(messages, param):
    assert refused(lambda: chat(messages=messages).prompt()).param == param


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = chat(messages=[{"role": "user", "content": parts}, {"role": "tool", "content": "c", "name": "f"}]).prompt()
    assert prompt.messages == [{"role": "user", "content": "ab"}, {"role": "tool", "content": "c", "name": "f"}]


def test_both_names_of_the_bound_must_agree():
    assert chat(max_completion_tokens=5).asked_sampling().max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).asked_sampling().max_tokens == 5
    assert (
        refused(lambda: chat(max_completion_tokens=5, max_tokens=6).asked_sampling()).param == "max_completion_tokens"
    )
    assert chat(max_completion_tokens=0).asked_sampling().max_tokens_field == "max_completion_tokens"


def test_stop_is_one_string_or_several():
    assert completion(stop="a").asked_sampling().stop == ("a",)
    assert completion(stop=["a", "b"]).asked_sampling().stop == ("a", "b")
    assert completion(stop=None).asked_sampling().stop == ()


@pytest.mark.parametrize(
    ("kind", "head", "item"),
    [
        (CompletionBody, b'{"prompt":"a","stop":[', b"1"),
        (CompletionBody, b'{"prompt":"a","stop_token_ids":[', b'""'),
        (ChatBody, b'{"messages":[', b"{}"),
        (ChatBody, b'{"messages":[{"role":"user","content":[', b"{}"),
    ],
)
def test_a_body_full_of_faults_is_refused_for_the_first(monkeypatch, kind, head, item):
    """A complaint for each of a million items would stop the event loop for a minute."""
    seen = []
    to_error = openai_models._to_baton_error
    monkeypatch.setattr(openai_models, "_to_baton_error", lambda e: seen.append(e.error_count()) or to_error(e))
    tail = b"]}]}" if b"role" in head else b"]}"
    with pytest.raises(BatonError):
        parse_body(kind, head + b",".join([item] * 1000) + tail)
    assert seen[0] <= 3


def test_messages_and_prompts_are_bounded_in_number():
    assert refused(chat, messages=[USER] * 10_001).param == "messages"
    for prompts in (["a"] * 129, [[1]] * 129, [[]] * 129):
        assert "at most 128 prompts" in str(refused(completion(prompt=prompts).prompts))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"min_tokens": "1"}, "min_tokens"),
        ({"presence_penalty": "0"}, "presence_penalty"),
        ({"frequency_penalty": []}, "frequency_penalty"),
        ({"repetition_penalty": "x"}, "repetition_penalty"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ],
)
@pytest.mark.parametrize("body", [completion, chat])
def test_sampling_fields_of_a_wrong_kind_are_refused_by_name(body, fields, param):
    assert refused(body, **fields).param == param


@pytest.mark.parametrize(
    ("body", "fields", "param"),
    [
        (completion, {"logprobs": 6}, "logprobs"),
        (completion, {"logprobs": -1}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"best_of": 2, "stream": True}, "best_of"),
        (completion, {"echo": True, "logprobs": 1, "stream": True}, "echo"),
        (completion, {"echo": "yes"}, "echo"),
        (chat, {"logprobs": 1}, "logprobs"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"best_of": 2}, "best_of"),
        (chat, {"echo": True}, "echo"),
    ],
)
def test_fields_that_contradict_each_other_or_the_endpoint_are_refused_by_name(body, fields, param):
    assert refused(body, **fields).param == param


def test_asked_sampling_holds_what_the_body_said():
    asked = completion(
        n=2, best_of=3, logprobs=2, echo=True, logit_bias={"5": 1, "07": -2.5}, min_tokens=1, presence_penalty=0.5
    ).asked_sampling()
    assert (asked.n, asked.best_of, asked.num_choices) == (2, 3, 3)
    assert asked.logit_bias == {5: 1.0, 7: -2.5}
    assert (asked.logprobs, asked.prompt_logprobs) == (2, 2), "an echo tells the prompt's logprobs, too"
    assert (asked.min_tokens, asked.presence_penalty) == (1, 0.5)
    asked = chat(logprobs=True, top_logprobs=7).asked_sampling()
    assert (asked.logprobs, asked.logprobs_field) == (7, "top_logprobs")
    assert chat(logprobs=True).asked_sampling().logprobs == 0
    assert chat(logprobs=False).asked_sampling().logprobs is None


@pytest.mark.parametrize("key", ["a", "-1", "1" * 5000, "1.0", "", "²"])
def test_a_bias_is_of_token_ids(key):
    def asked_sampling(**fields):
        return completion(**fields).asked_sampling()

    assert refused(asked_sampling, logit_bias={key: 1}).param == "logit_bias"
