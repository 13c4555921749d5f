"""A config.json is either understood exactly as transformers understands it, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import StartupError
from common.model.config import Llama3RopeScaling, load_model_config, resolve_dtype

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
ABSENT = object()


def write(folder: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_absent_keys_take_transformers_defaults(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, {}))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert config.rope_scaling is None
    assert not config.tie_word_embeddings
    assert config.stored_dtype == "float32"


def test_head_dim_and_key_value_heads_may_differ_from_the_defaults(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, {"head_dim": 32, "num_key_value_heads": 2}))
    assert (config.q_size, config.kv_size) == (128, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": "llama3"}},
    ],
)
def test_rope_is_read_from_old_and_new_keys(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = load_model_config(write(tmp_path, changes))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 128)


@pytest.mark.parametrize("changes", [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_plain_rope_has_no_scaling(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert load_model_config(write(tmp_path, changes)).rope_scaling is None


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 7], {"eos_token_id": 7}, (2, 7)),
        (ABSENT, {"eos_token_id": [5, 6]}, (5, 6)),
        (None, {}, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(tmp_path: Path, eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert load_model_config(write(tmp_path, {"eos_token_id": eos}, generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ABSENT}, "architecture None"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "Other"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_hidden_layers": ABSENT}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": "300"}, "vocab_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"dtype": "float64"}, "dtype"),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 256}, "sliding_window"),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 256}, "sliding_window"),
        ({**QWEN3, "sliding_window": 256, "use_sliding_window": True}, "sliding_window"),
        ({**QWEN3, "attention_bias": True}, "attention_bias"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "num_local_experts 8"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 0}, "num_local_experts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError) as caught:
        load_model_config(write(tmp_path, changes))
    message = str(caught.value)
    assert named in message
    assert str(tmp_path / "config.json") in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_mistral_without_an_effective_window_is_a_llama(tmp_path: Path, window: int | None) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    assert load_model_config(write(tmp_path, changes)).num_layers == 2


def test_families_take_their_own_defaults(tmp_path: Path) -> None:
    qwen2 = load_model_config(write(tmp_path, {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 256}))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.num_experts) == (True, False, 0)
    qwen3 = load_model_config(write(tmp_path, QWEN3))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    mixtral = load_model_config(write(tmp_path, {"architectures": ["MixtralForCausalLM"]}))
    assert (mixtral.num_experts, mixtral.num_experts_per_token) == (8, 2)
    assert (mixtral.rope_theta, mixtral.rms_norm_eps) == (1e6, 1e-5)


@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StartupError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_auto_dtype_is_the_stored_one_unless_it_would_lose_or_cost_something(tmp_path: Path) -> None:
    stored = load_model_config(write(tmp_path, {"torch_dtype": "bfloat16"}))
    assert resolve_dtype("auto", stored) == "bfloat16"
    assert resolve_dtype("float32", stored) == "float32"
    half = load_model_config(write(tmp_path, {"torch_dtype": "float16"}))
    assert resolve_dtype("bfloat16", half) == "bfloat16"
    with pytest.raises(StartupError, match="--dtype"):
        resolve_dtype("auto", half)
