"""What users run: the openai SDK, the examples, gRPC; and what hostile or careless clients send."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import Cluster, post

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def sdk(cluster) -> openai.OpenAI:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_openai_sdk_gets_the_same_answer_streamed_and_whole(sdk):
    model = sdk.models.list().data[0].id
    whole = sdk.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)
    stream = sdk.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert "Paris" in text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(chunks[-1].usage, c) for c in counts] == [getattr(whole.usage, c) for c in counts]
    assert all(c.usage is None for c in chunks[:-1])


def test_openai_sdk_text_completion_and_stop_string(sdk):
    model = sdk.models.list().data[0].id
    free = sdk.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=24, temperature=0)
    assert free.usage.completion_tokens == 24
    assert free.choices[0].finish_reason == "length"
    stopped = sdk.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=24, temperature=0, stop=[" 7"])
    assert stopped.choices[0].text == free.choices[0].text.split(" 7")[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_openai_sdk_raises_the_typed_errors(sdk):
    model = sdk.models.list().data[0].id
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        sdk.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
        sdk.completions.create(model=model, prompt=[5] * 9000, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("example", sorted(p.name for p in EXAMPLES.glob("*.py")))
def test_every_example_runs(cluster, example):
    flag = ["--address", cluster.grpc_address] if "grpc" in example else ["--url", cluster.url]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *flag], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


BAD = [
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": 5}, 400, "prompt"),
    ("completions", {"prompt": [1, "a"]}, 400, "prompt"),
    ("completions", {"prompt": [-1]}, 400, "prompt"),
    ("completions", {"prompt": [10**9]}, 400, "prompt"),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 10**7}, 400, "max_tokens"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n"),
    ("completions", {"prompt": "a", "stream": "yes"}, 400, "stream"),
    ("completions", {"prompt": "a", "model": "nope"}, 404, "model"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": "hi"}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
    ("chat/completions", {"messages": QUESTION, "seed": 1.5}, 400, "seed"),
]


@pytest.mark.parametrize(("path", "body", "status", "field"), BAD)
def test_bad_input_is_a_4xx_that_names_the_field(cluster, path, body, status, field):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{cluster.url}/v1/{path}", body)
    error = json.loads(caught.value.read())["error"]
    assert caught.value.code == status
    assert error["param"].startswith(field)
    assert isinstance(error["code"], str)
    assert "\n" not in error["message"]


def test_broken_json_is_a_400(cluster):
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions", b'{"prompt": ', {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 400
    assert "JSON" in json.loads(caught.value.read())["error"]["message"]


def test_garbage_on_the_ports_harms_nobody(cluster: Cluster):
    for address in (cluster.url.removeprefix("http://"), cluster.grpc_address, cluster.workers()[0].grpc_address):
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(bytes(range(256)) * 64)
    answer = post(f"{cluster.url}/v1/completions", {"prompt": "The sea", "max_tokens": 4})
    assert answer["usage"]["completion_tokens"] >= 1
