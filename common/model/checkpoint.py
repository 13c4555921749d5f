"""Where a checkpoint's tensors lie, and whether they are what the model needs. Reads headers only; no torch.

A folder holds one safetensors file, or shards and an index that maps each tensor's name to its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from common.errors import StartupError
from common.model.config import ModelConfig
from common.model.config_keys import read_json_object

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
EMBED: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
LM_HEAD: Final = "lm_head.weight"
EXPERT_ROUTER: Final = "block_sparse_moe.gate"
_STORED_DTYPES: Final = ("F32", "BF16", "F16")
_IGNORED_SUFFIX: Final = "rotary_emb.inv_freq"  # in older exports; follows from config.json


def check_weights(folder: Path, config: ModelConfig) -> dict[str, Path]:
    """The file of each tensor the model needs. Reads headers only.

    Raises StartupError, one line naming tensor and file: a missing, unknown or misshapen tensor, an unexpected dtype, a
    missing shard, a truncated or corrupt file.
    """
    found: dict[str, Path] = {}
    expected = expected_shapes(config)
    for path in weight_files(folder):
        with opened(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in expected:
                    _check_tensor(file, name, expected[name], path)
                    found[name] = path
                elif not (name.endswith(_IGNORED_SUFFIX) or name == LM_HEAD):
                    raise StartupError(f"unexpected tensor {name!r} in {path}: {config.architecture} has none such")
    missing = next((name for name in expected if name not in found), None)
    if missing is not None:
        raise StartupError(f"tensor {missing!r} is missing from {folder / _described(folder)}")
    return found


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint must hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (config.q_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.q_size),
        "post_attention_layernorm": (hidden,),
    }
    if config.qk_norm:
        of_layer |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    if config.num_experts:
        of_layer[EXPERT_ROUTER] = (config.num_experts, hidden)
    for e in range(config.num_experts or 1):
        gate, up, down = mlp_names(config, e)
        of_layer |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    biases = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size} if config.qkv_bias else {}
    for i in range(config.num_layers):
        shapes.update({f"model.layers.{i}.{name}.weight": shape for name, shape in of_layer.items()})
        shapes.update({f"model.layers.{i}.self_attn.{kind}_proj.bias": (rows,) for kind, rows in biases.items()})
    return shapes


def mlp_names(config: ModelConfig, expert: int) -> tuple[str, str, str]:
    """Gate, up and down projection of an expert (0 of a dense MLP), as a layer's checkpoint calls them."""
    if not config.num_experts:
        return "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
    w1, w2, w3 = (f"block_sparse_moe.experts.{expert}.w{i}" for i in (1, 2, 3))
    return w1, w3, w2


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, sorted. Raises StartupError if there are none, or a shard is missing."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.exists():
        raise StartupError(f"no weights in {folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise StartupError(f"{index}: 'weight_map' must map tensor names to file names")
    for name, shard in weight_map.items():
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise StartupError(f"shard {shard!r}, which {index} names for tensor {name!r}, is missing: fetch it again")
    return [folder / shard for shard in sorted(set(weight_map.values()))]


def _check_tensor(file: Any, name: str, shape: tuple[int, ...], path: Path) -> None:
    header = file.get_slice(name)
    if tuple(header.get_shape()) != shape:
        raise StartupError(f"tensor {name!r} in {path} has shape {header.get_shape()}, config.json says {list(shape)}")
    if header.get_dtype() not in _STORED_DTYPES:
        raise StartupError(
            f"tensor {name!r} in {path} is {header.get_dtype()}: {', '.join(_STORED_DTYPES)} are supported"
        )


@contextmanager
def opened(path: Path, framework: str) -> Iterator[Any]:
    """A safetensors file to read tensors of `framework` ("np", "pt") from. Raises StartupError, also from within."""
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        raise StartupError(f"{path} is truncated or corrupt ({error}): fetch it again") from None
    except OSError as error:
        raise StartupError(f"can't read {path}: {error.strerror or error}") from None


def _described(folder: Path) -> str:
    return SINGLE_FILE if (folder / SINGLE_FILE).exists() else INDEX_FILE
