"""Whatever stands in whatever field of a request: an answer, or a refusal that names the field. Never a 5xx."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path

import grpc
import httpx
import pytest

from baton.common.v1 import common_pb2
from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from router.gateway.openai_models import ChatBody, CompletionBody
from tests.fakes.router_cluster import mock_cluster
from tests.tiny_model import make_tiny_model

VALUES = [
    None, True, 0, -1, 21, 0.5, 1e300, 2**32, 2**64, 10**40, "", "x", "1", "\u0000", "y" * 5000, [], [1], [300], ["a"],
    [None], [["a"]], {}, {"1": 1}, {"300": 1}, {"a": 1}, {"1": "a"}, {"1": 1e300}, {"": 0},
]  # fmt: skip
RAW = ["NaN", "-Infinity", "1e999", '{"1": NaN}']
# Fields of which a refusal may name either: they contradict each other.
RELATED = {
    "max_tokens", "max_completion_tokens", "min_tokens", "best_of", "n", "stream", "stream_options", "logprobs",
    "top_logprobs", "prompt_logprobs", "echo",
}  # fmt: skip
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fuzz") / "tiny")


def bodies(kind: type, base: dict) -> list[tuple[str, str]]:
    """(field, body) of every value in every field."""
    fields = sorted(kind.model_fields)
    plain = [(f, json.dumps({**base, f: value})) for f, value in itertools.product(fields, VALUES)]
    raw = [(f, json.dumps({**base, f: "@"}).replace('"@"', text)) for f, text in itertools.product(fields, RAW)]
    return plain + raw


@pytest.mark.parametrize(
    ("path", "kind", "base"),
    [
        ("/v1/completions", CompletionBody, {"prompt": "hello", "max_tokens": 2}),
        ("/v1/chat/completions", ChatBody, {"messages": CHAT, "max_tokens": 2}),
    ],
)
async def test_any_value_in_any_field_is_answered_or_refused_by_name(folder, path, kind, base):
    async with mock_cluster(folder) as cluster:
        slots = asyncio.Semaphore(32)

        async def check(field: str, body: str) -> None:
            async with slots:
                response = await cluster.http.post(path, content=body, headers={"content-type": "application/json"})
            check_answer(field, response, f"{field}: {body[:200]} → {response.status_code} {response.text[:300]}")

        await asyncio.gather(*(check(field, body) for field, body in bodies(kind, base)))
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the end of all requests")
        cluster.assert_nothing_left()


def check_answer(field: str, response: httpx.Response, where: str) -> None:
    if response.status_code == 200 or (field == "timeout" and response.status_code in (429, 504)):
        return
    assert response.status_code in (400, 404), where
    error = response.json()["error"]
    assert "\n" not in error["message"]
    if "not valid JSON" not in error["message"]:
        assert error["param"], where
        assert error["param"].startswith(field) or {field, error["param"]} <= RELATED, where


def samplings() -> list[tuple[str, inference_pb2.SamplingParams]]:
    floats = [math.nan, math.inf, -math.inf, 1e38, -1.0, 0.0, 0.5, 3.0]
    whole = [0, 1, 21, 300, 2**31, 2**32 - 1]
    made = []
    for field in inference_pb2.SamplingParams.DESCRIPTOR.fields:
        if field.name == "logit_bias":
            maps = [{1: f} for f in floats] + [{w: 1.0} for w in whole] + [dict.fromkeys(range(299), 1.0)]
            made += [(field.name, inference_pb2.SamplingParams(logit_bias=m)) for m in maps]
            continue
        values = {field.TYPE_FLOAT: floats, field.TYPE_BOOL: [True, False], field.TYPE_STRING: ["", "x", "y" * 5000]}
        for value in values.get(field.type, [*whole, *([2**64 - 1] if field.type == field.TYPE_UINT64 else [])]):
            value = [value] * 5 if field.is_repeated else value
            made.append((field.name, inference_pb2.SamplingParams(**{field.name: value})))
    return made


async def test_any_sampling_value_over_grpc_is_answered_or_refused_by_name(folder):
    async with mock_cluster(folder) as cluster, grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate()
        asked = samplings()
        for number, (_, sampling) in enumerate(asked):
            if not sampling.HasField("max_tokens"):
                sampling.max_tokens = 2
            start = inference_pb2.StartGeneration(request_id=str(number), text="hello", sampling=sampling)
            await call.write(inference_pb2.GenerateRequest(start=start))
            while (frame := await call.read()).WhichOneof("frame") == "chunk":
                assert frame.request_id == str(number)
            if frame.HasField("error"):
                field = asked[number][0]
                kinds = (common_pb2.ERROR_KIND_INVALID_REQUEST, common_pb2.ERROR_KIND_CONTEXT_LENGTH)
                assert frame.error.kind in kinds, (field, frame)
                assert frame.error.param == field, (sampling, frame)
            else:
                assert frame.HasField("finished")
        await call.done_writing()
        cluster.assert_nothing_left()
