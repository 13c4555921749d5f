"""What Baton knows of a model: the part of a Hugging Face config.json that its decoder (llama.py) computes from.

Whatever the implementation can't do is refused here by name, before a weight is read. No torch: routers import this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from common.errors import StartupError
from common.model.config_keys import JsonKeys, read_json_object

Dtype = Literal["float32", "bfloat16"]
_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Family:
    """In what an architecture differs from Llama. Defaults are those of transformers, for keys that config.json lacks.

    slides: whether `sliding_window` counts: "never", "always", or the key of the flag that says so.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    slides: str = "never"
    window: int | None = None


_FAMILIES: Final = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(slides="always", window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, slides="use_sliding_window", window=4096),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128, slides="use_sliding_window", window=4096),
    "MixtralForCausalLM": _Family(experts=True, slides="always", rms_norm_eps=1e-5, rope_theta=1e6),
}


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

    intermediate_size: of one expert where there are experts. qkv_bias: q, k and v projections add a bias (Qwen2).
    qk_norm: each head of q and k is normalised before its rotation (Qwen3). num_experts: 0 is a dense MLP; else each
    token goes through num_experts_per_token of them (Mixtral, arXiv:2401.04088).
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
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0

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
    keys = JsonKeys(read_json_object(path), path)
    architecture = _architecture(keys)
    family = _FAMILIES[architecture]
    _refuse_unsupported(keys, family)
    num_heads = keys.positive("num_attention_heads")
    hidden_size = keys.positive("hidden_size")
    num_kv_heads = keys.positive("num_key_value_heads", num_heads)
    head_dim = keys.positive("head_dim", family.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise StartupError(
            f"{path}: {num_heads} heads, {num_kv_heads} key-value heads, head_dim {head_dim}: heads must divide evenly"
            " and head_dim be even"
        )
    max_position_embeddings = keys.positive("max_position_embeddings")
    theta, scaling = _rope(keys, max_position_embeddings, family.rope_theta)
    num_experts, num_experts_per_token = _experts(keys) if family.experts else (0, 0)
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
        rms_norm_eps=keys.number("rms_norm_eps", family.rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(keys, folder),
        stored_dtype=_stored_dtype(keys),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
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


def _architecture(keys: JsonKeys) -> str:
    named = keys.values.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise StartupError(f"{keys.path}: architecture {architecture!r} is not supported: {', '.join(_FAMILIES)} are")
    return architecture


def _refuse_unsupported(keys: JsonKeys, family: _Family) -> None:
    """Everything that would change the computation and isn't implemented."""
    for name in ("attention_bias", "mlp_bias"):
        if keys.flag(name):
            raise keys.bad(name, "is not supported: only projections without a bias are")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise keys.bad("hidden_act", "must be 'silu'")
    if keys.values.get("quantization_config") is not None:
        raise StartupError(f"{keys.path}: 'quantization_config' is not supported: give unquantised weights")
    window = keys.values.get("sliding_window", family.window)
    slides = family.slides == "always" or (family.slides != "never" and keys.flag(family.slides))
    if slides and window is not None and window < keys.positive("max_position_embeddings"):
        raise StartupError(f"{keys.path}: 'sliding_window' {window} is below the context: not supported")


def _experts(keys: JsonKeys) -> tuple[int, int]:
    """(number of experts, those that each token goes through)."""
    num_experts = keys.positive("num_local_experts", 8)
    each = keys.positive("num_experts_per_tok", 2)
    if each > num_experts:
        raise keys.bad("num_experts_per_tok", f"must be at most num_local_experts {num_experts}")
    return num_experts, each


def _rope(keys: JsonKeys, max_position_embeddings: int, default_theta: float) -> tuple[float, Llama3RopeScaling | None]:
    """transformers 5 keeps theta and scaling under `rope_parameters`; it was `rope_theta` and `rope_scaling` before."""
    source = next((name for name in ("rope_parameters", "rope_scaling") if keys.values.get(name)), None)
    values = keys.values.get(source) if source else {}
    if not isinstance(values, dict):
        raise keys.bad(source or "", "must be an object")
    nested = JsonKeys(values, keys.path)
    theta = nested.number("rope_theta", keys.number("rope_theta", default_theta))
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


def _eos_token_ids(keys: JsonKeys, folder: Path) -> tuple[int, ...]:
    ids = keys.token_ids("eos_token_id")
    path = folder / "generation_config.json"
    if path.exists():
        ids += JsonKeys(read_json_object(path), path).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _stored_dtype(keys: JsonKeys) -> str:
    """`dtype` in transformers 5, `torch_dtype` before; transformers takes float32 where neither is given."""
    name = "dtype" if keys.values.get("dtype") is not None else "torch_dtype"
    value = keys.values.get(name)
    if value is None:
        return "float32"
    if value not in _DTYPES:
        raise keys.bad(name, f"must be one of {', '.join(_DTYPES)}")
    return str(value)
