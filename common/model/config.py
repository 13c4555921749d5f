"""What Baton knows of a model: the part of a Hugging Face config.json that its Llama implementation computes from.

Whatever the implementation can't do is refused here by name, before a weight is read. No torch: routers import this.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from common.errors import StartupError

Dtype = Literal["float32", "bfloat16"]
_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM")
_DTYPES: Final = ("float32", "bfloat16", "float16")
_MISTRAL_DEFAULT_WINDOW: Final = 4096  # of transformers' MistralConfig, where config.json has no such key


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency bands of Llama 3.1's long-context rotary embedding (arXiv:2407.21783; transformers' "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder.

    stored_dtype: what config.json says of the weights: "float32", "bfloat16" or "float16".
    eos_token_ids: config.json's, then those that generation_config.json adds. rope_scaling: None is plain RoPE.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    stored_dtype: str

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key, and of the value projection."""
        return self.num_kv_heads * self.head_dim


def load_model_config(folder: Path) -> ModelConfig:
    """Parse and check `folder`/config.json (and generation_config.json, if there). Raises StartupError, one line."""
    path = folder / "config.json"
    keys = _Keys(read_json_object(path), path)
    architecture = _architecture(keys)
    _refuse_unsupported(keys, architecture)
    num_heads = keys.positive("num_attention_heads")
    hidden_size = keys.positive("hidden_size")
    num_kv_heads = keys.positive("num_key_value_heads", num_heads)
    head_dim = keys.positive("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise StartupError(
            f"{path}: {num_heads} heads, {num_kv_heads} key-value heads, head_dim {head_dim}: heads must divide evenly"
            " and head_dim be even"
        )
    max_position_embeddings = keys.positive("max_position_embeddings")
    theta, scaling = _rope(keys, max_position_embeddings)
    return ModelConfig(
        architecture=architecture,
        num_layers=keys.positive("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=keys.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=keys.positive("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(keys, folder),
        stored_dtype=_stored_dtype(keys),
    )


def resolve_dtype(setting: str, config: ModelConfig) -> Dtype:
    """The dtype to run in, from the setting "auto" | "float32" | "bfloat16". Raises StartupError."""
    wanted = config.stored_dtype if setting == "auto" else setting
    if wanted == "float32":
        return "float32"
    if wanted == "bfloat16":
        return "bfloat16"
    raise StartupError(
        f"the model's weights are {wanted}: choose --dtype bfloat16 (half the memory) or float32 (exact)"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises StartupError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"can't read {path}: {error.strerror}; a Hugging Face model folder has it") from None
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object")
    return value


class _Keys:
    """Typed reads of one JSON object; every complaint names key and file. A null counts as absent."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def bad(self, name: str, what: str) -> StartupError:
        return StartupError(f"{self.path}: {name!r} {what}, found {self.values.get(name)!r}")

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.bad(name, "must be a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.bad(name, "must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.bad(name, "must be true or false")

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.bad(name, "must be a token id or a list of them")
        return tuple(ids)


def _architecture(keys: _Keys) -> str:
    named = keys.values.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else named
    if architecture not in _ARCHITECTURES:
        raise StartupError(
            f"{keys.path}: architecture {architecture!r} is not supported: {', '.join(_ARCHITECTURES)} are"
        )
    return str(architecture)


def _refuse_unsupported(keys: _Keys, architecture: str) -> None:
    """Everything that would change the computation and isn't implemented."""
    for name in ("attention_bias", "mlp_bias"):
        if keys.flag(name):
            raise keys.bad(name, "is not supported: only projections without a bias are")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise keys.bad("hidden_act", "must be 'silu'")
    if keys.values.get("quantization_config") is not None:
        raise StartupError(f"{keys.path}: 'quantization_config' is not supported: give unquantised weights")
    if architecture == "MistralForCausalLM":
        window = keys.values.get("sliding_window", _MISTRAL_DEFAULT_WINDOW)
        if window is not None and window < keys.positive("max_position_embeddings"):
            raise StartupError(f"{keys.path}: 'sliding_window' {window} is below the context: not supported")


def _rope(keys: _Keys, max_position_embeddings: int) -> tuple[float, Llama3RopeScaling | None]:
    """transformers 5 keeps theta and scaling under `rope_parameters`; it was `rope_theta` and `rope_scaling` before."""
    source = next((name for name in ("rope_parameters", "rope_scaling") if keys.values.get(name)), None)
    values = keys.values.get(source) if source else {}
    if not isinstance(values, dict):
        raise keys.bad(source or "", "must be an object")
    nested = _Keys(values, keys.path)
    theta = nested.number("rope_theta", keys.number("rope_theta", 10000.0))
    if values.get("partial_rotary_factor", keys.values.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise StartupError(f"{keys.path}: 'partial_rotary_factor' is not supported")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise StartupError(
            f"{keys.path}: rope type {kind!r} in {source!r} is not supported: 'default' and 'llama3' are"
        )
    scaling = Llama3RopeScaling(
        factor=nested.number("factor"),
        low_freq_factor=nested.number("low_freq_factor"),
        high_freq_factor=nested.number("high_freq_factor"),
        original_max_position_embeddings=nested.positive("original_max_position_embeddings", max_position_embeddings),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise nested.bad("high_freq_factor", f"must be above low_freq_factor {scaling.low_freq_factor}")
    return theta, scaling


def _eos_token_ids(keys: _Keys, folder: Path) -> tuple[int, ...]:
    ids = keys.token_ids("eos_token_id")
    path = folder / "generation_config.json"
    if path.exists():
        ids += _Keys(read_json_object(path), path).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _stored_dtype(keys: _Keys) -> str:
    """`dtype` in transformers 5, `torch_dtype` before; transformers takes float32 where neither is given."""
    name = "dtype" if keys.values.get("dtype") is not None else "torch_dtype"
    value = keys.values.get(name)
    if value is None:
        return "float32"
    if value not in _DTYPES:
        raise keys.bad(name, f"must be one of {', '.join(_DTYPES)}")
    return str(value)
