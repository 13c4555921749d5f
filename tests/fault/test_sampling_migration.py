"""A decode worker dies while it samples several penalised continuations: the client reads what it would have read."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from collections.abc import Iterator

import psutil
import pytest

from common.registry import WorkerRecord
from tests.e2e.conftest import Cluster, post, start_cluster
from tests.tiny_model import make_tiny_model

PROMPT = [17, 5, 99, 23, 42, 7, 150, 31, 200, 11, 64, 3, 88]
BODY = {
    "prompt": PROMPT, "max_tokens": 400, "n": 3, "ignore_eos": True, "return_token_ids": True, "temperature": 1.2,
    "seed": 21, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 400, "logprobs": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    # Slow enough that a stream lasts seconds.
    size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "head_dim": 64}
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", **size)
    settings = ["--decode", "2", "--set", f"kv_cache_bytes={16 << 20}"]
    yield from start_cluster(tmp_path_factory.mktemp("migration"), folder, *settings)


def process_of(cluster: Cluster, worker: WorkerRecord) -> psutil.Process:
    port = int(worker.grpc_address.rpartition(":")[2])
    return next(
        child
        for child in cluster.children()
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in child.net_connections("tcp"))
    )


def is_busy(cluster: Cluster, worker: WorkerRecord) -> bool:
    return cluster.gauges(worker.metrics_url)["baton_requests_running"] > 0


def test_choices_survive_their_workers_death_token_for_token(cluster):
    undisturbed = post(f"{cluster.url}/v1/completions", BODY)["choices"]
    body = json.dumps({**BODY, "stream": True}).encode()
    request = urllib.request.Request(f"{cluster.url}/v1/completions", body, {"content-type": "application/json"})
    tokens: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[float]] = defaultdict(list)
    decodes = [(w, process_of(cluster, w)) for w in cluster.workers() if w.role == "decode"]
    killed = False
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens[choice["index"]] += choice["token_ids"]
                logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
            if not killed and min(len(tokens[i]) for i in range(3)) >= 30:
                next(process for worker, process in decodes if is_busy(cluster, worker)).kill()
                killed = True
    assert killed
    assert [tokens[i] for i in range(3)] == [choice["token_ids"] for choice in undisturbed]
    for i in range(3):
        assert logprobs[i] == pytest.approx(undisturbed[i]["logprobs"]["token_logprobs"], abs=1e-3)
    retries = cluster.gauges(f"{cluster.url}/metrics")
    assert sum(v for k, v in retries.items() if k.startswith("baton_request_retries_total")) >= 3
