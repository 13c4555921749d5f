"""A checkpoint is loaded whole and exactly, or refused in one line that names tensor and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import StartupError
from common.model.config import load_model_config
from common.model.fingerprint import model_fingerprint
from common.model.weights import iter_weights, load_weights
from tests.tiny_model import make_tiny_model

CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Replaces the single file by two shards and an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name].clone() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load_weights(folder, load_model_config(folder), torch.float32, CPU)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_tensor_lands_in_its_place(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    weights = load_weights(folder, load_model_config(folder), torch.float32, CPU)
    assert torch.equal(weights.embed, stored["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head, stored["lm_head.weight"])
    assert torch.equal(weights.norm, stored["model.norm.weight"])
    for i, layer in enumerate(weights.layers):
        of_layer = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in stored.items()}
        qkv = torch.cat([of_layer[f"self_attn.{kind}_proj.weight"] for kind in "qkv"])
        assert torch.equal(layer.qkv, qkv)
        assert torch.equal(layer.gate_up, torch.cat([of_layer[f"mlp.{kind}_proj.weight"] for kind in ("gate", "up")]))
        assert torch.equal(layer.o, of_layer["self_attn.o_proj.weight"])
        assert torch.equal(layer.down, of_layer["mlp.down_proj.weight"])
        assert torch.equal(layer.input_norm, of_layer["input_layernorm.weight"])
        assert torch.equal(layer.post_norm, of_layer["post_attention_layernorm.weight"])


def test_shards_load_as_the_single_file_does(folder: Path) -> None:
    config = load_model_config(folder)
    whole = {name: tensor.clone() for name, tensor in iter_weights(folder, config)}
    shard(folder)
    sharded = dict(iter_weights(folder, config))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize(("stored", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_weights_are_converted_to_the_wanted_dtype(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    folder = make_tiny_model(tmp_path, dtype=stored)
    weights = load_weights(folder, load_model_config(folder), wanted, CPU)
    assert weights.layers[0].down.dtype == wanted
    assert torch.equal(weights.norm, load_file(folder / "model.safetensors")["model.norm.weight"].to(wanted))


def test_tied_embeddings_are_one_tensor_and_a_stored_lm_head_is_passed_over(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(300, 64)}))
    weights = load_weights(folder, load_model_config(folder), torch.float32, CPU)
    assert weights.lm_head is weights.embed


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(Q))
    message = refusal(folder)
    assert Q in message
    assert str(folder / "model.safetensors") in message


def test_a_missing_lm_head_is_named_where_it_is_not_tied(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q: torch.zeros(64, 32)}))
    message = refusal(folder)
    assert Q in message
    assert "[64, 32]" in message
    assert "[64, 64]" in message


def test_an_unexpected_dtype_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q: torch.zeros(64, 64, dtype=torch.int8)}))
    message = refusal(folder)
    assert Q in message
    assert "I8" in message


def test_a_tensor_the_model_has_no_use_for_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q.replace("weight", "bias"): torch.zeros(64)}))
    assert Q.replace("weight", "bias") in refusal(folder)


def test_derived_rotary_frequencies_are_passed_over(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_weights(folder, load_model_config(folder), torch.float32, CPU)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(folder)


def test_a_file_of_garbage_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert str(path) in refusal(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q: "../model.safetensors"}}))
    assert "../model.safetensors" in refusal(folder)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert str(folder) in refusal(folder)


class TestFingerprint:
    def test_it_depends_on_content_and_not_on_the_place(self, folder: Path, tmp_path: Path) -> None:
        assert model_fingerprint(folder) == model_fingerprint(make_tiny_model(tmp_path / "elsewhere"))
        assert model_fingerprint(folder) != model_fingerprint(make_tiny_model(tmp_path / "retrained", seed=1))

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_each_small_file_counts(self, folder: Path, name: str) -> None:
        before = model_fingerprint(folder)
        path = folder / name
        path.write_bytes(path.read_bytes() + b" ")
        assert model_fingerprint(folder) != before

    @pytest.mark.parametrize("where", [9, -1])
    def test_header_and_data_of_the_weights_count(self, folder: Path, where: int) -> None:
        before = model_fingerprint(folder)
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[where] ^= 1
        path.write_bytes(data)
        assert model_fingerprint(folder) != before

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_a_missing_file_is_one_line(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        with pytest.raises(StartupError):
            model_fingerprint(folder)

    def test_a_cut_off_header_is_one_line(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:20])
        with pytest.raises(StartupError, match=r"model\.safetensors"):
            model_fingerprint(folder)
