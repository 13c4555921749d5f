"""A cluster with int8 weights says what the torch reference says on the same rounded weights; a worker whose weights
are held otherwise is refused, with both values named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.die_with_parent import command as die_with_parent
from common.engine.batch import ScheduledSequence, build_batch
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.fingerprint import model_fingerprint
from common.model.interface import Model
from common.model.loader import load_model
from common.sampling_params import SamplingParams
from deploy.paths import RUN_PREFIX
from tests.e2e.conftest import CLUSTER, Cluster, poll_until, post, start_cluster
from tests.e2e.oracle import Oracle

CPU = torch.device("cpu")
BLOCK_SIZE = 16
MAX_TOKENS = 12
PROMPTS = ("prose-17", "prose-257", "code-128", "cjk", "question-0")


@pytest.fixture(scope="module")
def int8_cluster(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker, int8 weights, float32 activations."""
    folder = tmp_path_factory.mktemp("int8")
    yield from start_cluster(folder, model_folder, "--dtype", "float32", "--quantization", "int8")


def greedy_tokens(model: Model, prompt: list[int]) -> list[int]:
    config = model.config
    blocks = range(-(-(len(prompt) + MAX_TOKENS) // BLOCK_SIZE))
    layout = KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, "float32")
    cache = KvCache(layout, len(blocks), CPU)
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + MAX_TOKENS:
        step = ScheduledSequence(tokens[start:], start, blocks, SamplingParams(max_tokens=1, temperature=0.0))
        with torch.inference_mode():
            logits = model.forward(build_batch([step], BLOCK_SIZE, CPU), cache)
        start = len(tokens)
        tokens.append(int(logits[0].argmax()))
        if tokens[-1] in config.eos_token_ids:
            break
    return tokens[len(prompt) :]


def test_tokens_equal_the_reference_on_the_same_rounded_weights(int8_cluster: Cluster, model_folder: Path) -> None:
    prompts = Oracle(model_folder).prompts()
    reference = load_model(model_folder, torch.float32, CPU, quantization="int8")
    for name in PROMPTS:
        body = {"prompt": prompts[name], "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
        model = int8_cluster.workers()[0].model_name
        answer = post(f"{int8_cluster.url}/v1/completions", {"model": model, **body})
        assert answer["choices"][0]["token_ids"] == greedy_tokens(reference, prompts[name]), name


def test_a_worker_with_other_weights_is_refused_with_both_values(
    int8_cluster: Cluster, model_folder: Path, tmp_path: Path
) -> None:
    """The router names both fingerprints once, and goes on with the workers that fit."""
    command = [
        sys.executable, "-m", "deploy.cli", "decode", "--model", str(model_folder), "--dtype", "float32",
        "--worker-id", "stray", "--redis-url", int8_cluster.redis_url, "--set", f"cluster={CLUSTER}",
    ]  # fmt: skip
    plain = model_fingerprint(model_folder)
    with (tmp_path / "stray.log").open("wb") as out:
        stray = subprocess.Popen(die_with_parent(command), stdout=out, stderr=out, env=dict(os.environ))
    try:
        refusal = f"'{plain}+int8' here, '{plain}' there"
        poll_until(lambda: refusal in log_of(int8_cluster), f"{refusal} in the router's log", 60.0)
        model = next(worker.model_name for worker in int8_cluster.workers())
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        assert "Paris" in post(f"{int8_cluster.url}/v1/completions", body)["choices"][0]["text"]
    finally:
        stray.send_signal(signal.SIGINT)
        try:
            stray.wait(20)
        except subprocess.TimeoutExpired:
            stray.kill()
            stray.wait()


def log_of(cluster: Cluster) -> str:
    """The router's log, in the run directory of `baton serve`."""
    pids = [cluster.process.pid, *(child.pid for child in cluster.children())]
    folders = [f for pid in pids for f in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}{pid}-*")]
    return "\n".join(path.read_text(errors="replace") for folder in folders for path in folder.glob("router*.log"))
