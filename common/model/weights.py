"""A Llama's weights as tensors. Each is copied from the file's pages straight into its final place and dtype; those
pages, which the kernel drops as it likes, are the only second copy.

Projections that read the same input are stored as one matrix, so that each step reads its input once:

    qkv [q_size + 2 * kv_size, hidden]    rows: q, k, v          gate_up [2 * intermediate, hidden]    rows: gate, up
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from common.model.checkpoint import EMBED, LM_HEAD, NORM, check_weights, expected_shapes, opened
from common.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; all in the model's dtype, contiguous, on its device.

    input_norm, post_norm: [hidden]. qkv: [q_size + 2 * kv_size, hidden]. o: [hidden, q_size].
    gate_up: [2 * intermediate, hidden]. down: [hidden, intermediate].
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """embed: [vocab, hidden]. norm: [hidden]. lm_head: [vocab, hidden], the very tensor `embed` where they are tied."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor


def iter_weights(folder: Path, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Check, then give every tensor that the model needs, once: its name, and a view of the file's pages in the stored
    dtype. Copy what is to outlive the step. Raises StartupError like check_weights, from this call."""
    return _read(check_weights(folder, config))


def _read(found: dict[str, Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(set(found.values())):
        with opened(path, "pt") as file:
            for name, where in found.items():
                if where == path:
                    yield name, file.get_tensor(name)


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Check, then load into `dtype` on `device`. Raises StartupError like check_weights."""
    stored = iter_weights(folder, config)
    destinations: dict[str, torch.Tensor] = {}

    def place(rows: int, columns: int, *names: str) -> torch.Tensor:
        """One matrix that holds the named tensors one below the other."""
        matrix = torch.empty(rows, columns, dtype=dtype, device=device)
        counts = [expected[name][0] for name in names]
        destinations.update(zip(names, torch.split_with_sizes(matrix, counts), strict=True))
        return matrix

    def vector(name: str) -> torch.Tensor:
        destinations[name] = torch.empty(config.hidden_size, dtype=dtype, device=device)
        return destinations[name]

    expected = expected_shapes(config)
    hidden, inner, q_size, kv_size = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    layers = []
    for prefix in (f"model.layers.{i}." for i in range(config.num_layers)):
        q, k, v = (f"{prefix}self_attn.{kind}_proj.weight" for kind in "qkv")
        gate, up = (f"{prefix}mlp.{kind}_proj.weight" for kind in ("gate", "up"))
        layers.append(
            LayerWeights(
                input_norm=vector(f"{prefix}input_layernorm.weight"),
                qkv=place(q_size + 2 * kv_size, hidden, q, k, v),
                o=place(hidden, q_size, f"{prefix}self_attn.o_proj.weight"),
                post_norm=vector(f"{prefix}post_attention_layernorm.weight"),
                gate_up=place(2 * inner, hidden, gate, up),
                down=place(hidden, inner, f"{prefix}mlp.down_proj.weight"),
            )
        )
    embed = place(config.vocab_size, hidden, EMBED)
    lm_head = embed if config.tie_word_embeddings else place(config.vocab_size, hidden, LM_HEAD)
    weights = LlamaWeights(embed=embed, layers=tuple(layers), norm=vector(NORM), lm_head=lm_head)
    for name, tensor in stored:
        destinations[name].copy_(tensor)
    return weights
