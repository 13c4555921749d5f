"""The end-to-end check: `baton serve` as a user starts it, its greedy tokens held against the torch reference."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from common.die_with_parent import command as die_with_parent
from common.engine.batch import ScheduledSequence
from common.engine.model_runner import ModelRunner
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.model.loader import load_model
from common.sampling_params import SamplingParams

READY_TIMEOUT_S: Final = 180.0
ANSWER_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 20.0
MAX_TOKENS: Final = 16
_BLOCK_SIZE: Final = 16
_LENGTHS: Final = (5, 16, 130, 700)


def check_cluster(model: Path, device: torch.device) -> str:
    """What was compared. Raises RuntimeError where the cluster doesn't come up or says something else."""
    expected = {length: _reference_tokens(model, device, _prompt(length)) for length in _LENGTHS}
    with _cluster(model, device) as url:
        name = _get(f"{url}/v1/models")["data"][0]["id"]
        for length, tokens in expected.items():
            body = {"model": name, "prompt": _prompt(length), "max_tokens": MAX_TOKENS, "temperature": 0}
            answer = _get(f"{url}/v1/completions", {**body, "return_token_ids": True})
            found = answer["choices"][0]["token_ids"]
            if found != tokens:
                raise RuntimeError(f"prompt of {length} tokens: the cluster says {found}, the reference {tokens}")
    return f"{len(expected)} prompts, greedy, float32: the reference's tokens"


def _prompt(length: int) -> list[int]:
    return [1000 + 37 * i % 5000 for i in range(length)]


def _reference_tokens(folder: Path, device: torch.device, prompt: list[int]) -> list[int]:
    model = load_model(folder, torch.float32, device, kernels="torch")
    config = model.config
    blocks = range(-(-(len(prompt) + MAX_TOKENS) // _BLOCK_SIZE))
    layout = KvLayout(config.num_layers, _BLOCK_SIZE, config.num_kv_heads, config.head_dim, "float32")
    runner = ModelRunner(model, KvCache(layout, len(blocks), device))
    tokens, start = list(prompt), 0
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    while len(tokens) < len(prompt) + MAX_TOKENS and (start == 0 or tokens[-1] not in config.eos_token_ids):
        step = ScheduledSequence(tokens[start:], start, blocks, greedy)
        start = len(tokens)
        token = runner.execute([step]).token_ids[0]
        if token is None:
            raise RuntimeError("the reference's logits are not finite")
        tokens.append(token)
    return tokens[len(prompt) :]


@contextmanager
def _cluster(model: Path, device: torch.device) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        sys.executable, "-m", "deploy.cli", "serve", "--no-demo", "--port", str(port), "--model", str(model),
        "--device", device.type, "--dtype", "float32", "--set", "local_prefill_max_tokens=0",
        "--set", "grpc_port=0", "--set", "max_running=16", "--set", "max_model_len=2048",
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(die_with_parent(command), stdout=log, stderr=log, env=dict(os.environ))
        try:
            _wait_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        except (RuntimeError, OSError) as error:
            log.seek(0)
            raise RuntimeError(f"{error}\n{log.read().decode(errors='replace')[-2000:]}") from None
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"baton serve ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"baton serve was not ready within {READY_TIMEOUT_S:.0f} s")


def _get(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        return json.loads(answer.read())
