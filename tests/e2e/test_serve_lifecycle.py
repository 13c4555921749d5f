"""`baton serve` as a user meets it: starts, answers, mends itself, stops without an orphan, says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.processes import all_gone, becomes_true, descendants

READY_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0
SMALL = ("--set", "check_when_idle=true", "--set", f"kv_cache_bytes={16 << 20}")


class Serve:
    """A running `baton serve`. Owned by `serving`, which ends it."""

    def __init__(self, process: subprocess.Popen, output: Path, port: int, runs: Path) -> None:
        self.process = process
        self.port = port
        self.runs = runs
        self._output = output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Of the supervisor and all it started."""
        return [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]

    def says(self, text: str, deadline_s: float = READY_DEADLINE_S) -> bool:
        becomes_true(lambda: text in self.output or self.process.poll() is not None, deadline_s)
        return text in self.output

    def complete(self, max_tokens: int = 4) -> dict:
        url = f"http://127.0.0.1:{self.port}/v1"
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(port: int, model: Path, *extra: str) -> list[str]:
    words = ["serve", "--port", str(port), "--model", str(model), *SMALL, *extra]
    return [sys.executable, "-P", "-m", "deploy.cli", *words]


def environment(tmp: Path) -> dict[str, str]:
    """TMPDIR: so that run directories can be counted."""
    (tmp / "runs").mkdir(exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    return {**clean, "TMPDIR": str(tmp / "runs")}


@contextmanager
def serving(tmp: Path, model: Path, *extra: str) -> Iterator[Serve]:
    port, output = free_port(), tmp / "serve.out"
    with output.open("wb") as out:
        process = subprocess.Popen(command(port, model, *extra), stdout=out, stderr=out, env=environment(tmp))
    serve = Serve(process, output, port, tmp / "runs")
    try:
        yield serve
    finally:
        pids = serve.pids() if process.poll() is None else []
        process.kill()
        process.wait()
        assert all_gone(pids)


def refused(tmp: Path, model: Path, *extra: str, port: int | None = None) -> str:
    """The one line with which the command ends."""
    done = subprocess.run(
        command(port or free_port(), model, *extra),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(tmp),
        check=False,
    )
    assert done.returncode == 2, done.stderr + done.stdout
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("baton: ")
    assert "Traceback" not in done.stdout
    return lines[0]


@pytest.fixture(scope="module")
def running(tmp_path_factory, tiny_model_folder) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("serve"), tiny_model_folder, "--no-demo") as serve:
        assert serve.says("Ctrl-C stops everything"), serve.output
        yield serve


def test_it_shows_a_streamed_answer_of_the_real_model_and_ctrl_c_ends_all(tmp_path, model_folder):
    with serving(tmp_path, model_folder, "--set", f"kv_cache_bytes={256 << 20}") as serve:
        assert serve.says("Ctrl-C stops everything"), serve.output
        for expected in (f"http://127.0.0.1:{serve.port}", "curl -N", "gRPC", model_folder.name, "A first answer"):
            assert expected in serve.output
        assert "no answer" not in serve.output
        assert "tokens/s" in serve.output
        assert len(serve.complete()["choices"][0]["text"]) > 0
        pids = serve.pids()
        assert len(pids) >= 5  # supervisor, Redis, router, prefill, decode
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(STOP_DEADLINE_S) == 0
        assert all_gone(pids)
        assert list(serve.runs.iterdir()) == []
        assert "Traceback" not in serve.output


def test_a_second_one_on_the_same_port_is_told_so(running, tmp_path, tiny_model_folder):
    line = refused(tmp_path, tiny_model_folder, port=running.port)
    assert f"port {running.port} on 127.0.0.1 is in use" in line
    assert "--port" in line


@pytest.mark.parametrize("part", ["decode", "prefill", "router", "redis-server"])
def test_a_part_that_is_killed_comes_back_and_serves(running, part):
    (victim,) = descendants(running.process.pid, part)
    os.kill(victim, signal.SIGKILL)
    assert all_gone([victim])

    def answers() -> bool:
        if not descendants(running.process.pid, part):
            return False
        try:
            return running.complete()["usage"]["completion_tokens"] == 4
        except OSError:
            return False

    assert becomes_true(answers, READY_DEADLINE_S), running.output
    assert "died; restarting" in running.output


def test_a_killed_supervisor_leaves_no_orphan(tmp_path, tiny_model_folder):
    with serving(tmp_path, tiny_model_folder, "--no-demo") as serve:
        assert serve.says("Ctrl-C stops everything"), serve.output
        pids = serve.pids()
        serve.process.kill()
        assert all_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_while_it_starts_leaves_nothing(tmp_path, tiny_model_folder, number):
    with serving(tmp_path, tiny_model_folder) as serve:
        assert becomes_true(lambda: len(serve.pids()) >= 4)
        pids = serve.pids()
        serve.process.send_signal(number)
        assert serve.process.wait(STOP_DEADLINE_S) == 0, serve.output
        assert all_gone(pids)
        assert list(serve.runs.iterdir()) == []


@pytest.fixture
def own_model(tiny_model_folder, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(tiny_model_folder, tmp_path / "own")


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_unsupported_architecture_is_named(own_model, tmp_path):
    edit_config(own_model, architectures=["MambaForCausalLM"], model_type="mamba")
    line = refused(tmp_path, own_model)
    assert "MambaForCausalLM" in line
    assert str(own_model / "config.json") in line


def test_a_truncated_file_is_named(own_model, tmp_path):
    weights = own_model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    assert str(weights) in refused(tmp_path, own_model)


def test_a_missing_tensor_is_named_with_its_file(own_model, tmp_path):
    weights = load_file(own_model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, own_model / "model.safetensors", {"format": "pt"})
    line = refused(tmp_path, own_model)
    assert "'model.norm.weight' is missing" in line
    assert str(own_model / "model.safetensors") in line


def test_a_wrong_shape_is_named_with_its_file(own_model, tmp_path):
    edit_config(own_model, intermediate_size=112)
    line = refused(tmp_path, own_model)
    assert "mlp." in line
    assert "model.safetensors" in line


def test_too_little_memory_is_told_before_anything_starts(tiny_model_folder, tmp_path):
    line = refused(tmp_path, tiny_model_folder, "--set", f"kv_cache_bytes={1 << 50}")
    assert "too little memory" in line
    assert "kv_cache_bytes" in line
