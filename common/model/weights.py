"""A Llama's weights as tensors. Each is copied from the file's pages straight into its final place and dtype; those
pages, which the kernel drops as it likes, are the only second copy.

Projections that read the same input are stored as one matrix, so that each step reads its input once:

    qkv [q_size + 2 * kv_size, hidden]    rows: q, k, v          gate_up [2 * intermediate, hidden]    rows: gate, up

Of a mixture of E experts, gate_up and down are stacked: [E, 2 * intermediate, hidden] and [E, hidden, intermediate].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from common.kernels.quantization import quantize
from common.model.checkpoint import (
    EMBED,
    EXPERT_ROUTER,
    LM_HEAD,
    NORM,
    check_weights,
    expected_shapes,
    mlp_names,
    opened,
)
from common.model.config import ModelConfig
from common.model.quantization import GROUP_SIZE, Quantization, quantization_of
from common.model.shard import WHOLE, Shard, shard_config, tensor_share


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; all in the model's dtype, contiguous, on its device.

    input_norm, post_norm: [hidden]. qkv: [q_size + 2 * kv_size, hidden]. o: [hidden, q_size].
    gate_up: [2 * intermediate, hidden]. down: [hidden, intermediate]; both with a leading E where there are experts.
    qkv_bias: [q_size + 2 * kv_size]. q_norm, k_norm: [head_dim]. expert_router: [E, hidden]. None where the model has
    none.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    expert_router: torch.Tensor | None = None


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


def _iter_shares(
    found: dict[str, Path], config: ModelConfig, shard: Shard, quantization: Quantization
) -> Iterator[tuple[str, torch.Tensor]]:
    """As _read, of one rank's share of each tensor: nothing else is read, but for the rest of the groups at the edges
    of a quantised matrix's columns, which are rounded together."""
    for path in sorted(set(found.values())):
        with opened(path, "pt") as file:
            for name, where in found.items():
                if where != path:
                    continue
                rows, columns = tensor_share(name, config, shard)
                held = quantization_of(name, config, quantization)
                stored = file.get_slice(name)
                if columns == slice(None):
                    yield name, _rounded(stored[rows], held)
                elif held == "none":
                    yield name, stored[rows, columns]
                else:
                    first = columns.start // GROUP_SIZE * GROUP_SIZE
                    end = min(-(-columns.stop // GROUP_SIZE) * GROUP_SIZE, stored.get_shape()[1])
                    whole_groups = _rounded(stored[rows, first:end], held)
                    yield name, whole_groups[:, columns.start - first : columns.stop - first]


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    shard: Shard = WHOLE,
) -> LlamaWeights:
    """Check, then load into `dtype` on `device`; matrices that are quantised are rounded to what their codes stand for.
    shard: of a tensor-parallel group, whose share alone is read and held; shapes are those of shard_config.
    Raises StartupError like check_weights."""
    found = check_weights(folder, config)
    destinations = _Destinations(shard_config(config, shard), dtype, device)
    layers = tuple(_layer(config, destinations, f"model.layers.{i}.") for i in range(config.num_layers))
    embed = destinations.place(EMBED)
    lm_head = embed if config.tie_word_embeddings else destinations.place(LM_HEAD)
    weights = LlamaWeights(embed=embed, layers=layers, norm=destinations.place(NORM), lm_head=lm_head)
    for name, tensor in _iter_shares(found, config, shard, quantization):
        destinations.of[name].copy_(tensor)
    return weights


class _Destinations:
    """Uninitialised tensors, and where in them each tensor of the checkpoint goes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.of: dict[str, torch.Tensor] = {}
        self._shapes = expected_shapes(config)
        self._dtype = dtype
        self._device = device

    def place(self, *names: str) -> torch.Tensor:
        """One tensor that holds the named ones one below the other."""
        shapes = [self._shapes[name] for name in names]
        counts = [shape[0] for shape in shapes]
        return self._fill(self._empty(sum(counts), *shapes[0][1:]), names, counts)

    def stack(self, experts: list[tuple[str, ...]]) -> torch.Tensor:
        """[E, …]: for each expert what `place` gives for its names."""
        shapes = [self._shapes[name] for name in experts[0]]
        counts = [shape[0] for shape in shapes]
        whole = self._empty(len(experts), sum(counts), *shapes[0][1:])
        for one, names in zip(whole, experts, strict=True):
            self._fill(one, names, counts)
        return whole

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fill(self, whole: torch.Tensor, names: tuple[str, ...], counts: list[int]) -> torch.Tensor:
        self.of.update(zip(names, torch.split_with_sizes(whole, counts), strict=True))
        return whole


def _layer(config: ModelConfig, to: _Destinations, prefix: str) -> LayerWeights:
    def named(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{name}.weight" for name in names)

    experts = [mlp_names(config, e) for e in range(config.num_experts or 1)]
    gate_up = [named(gate, up) for gate, up, _ in experts]
    down = [named(name) for _, _, name in experts]
    attention = tuple(f"self_attn.{kind}_proj" for kind in "qkv")
    biases = tuple(f"{prefix}{name}.bias" for name in attention)
    return LayerWeights(
        input_norm=to.place(*named("input_layernorm")),
        qkv=to.place(*named(*attention)),
        o=to.place(*named("self_attn.o_proj")),
        post_norm=to.place(*named("post_attention_layernorm")),
        gate_up=to.stack(gate_up) if config.num_experts else to.place(*gate_up[0]),
        down=to.stack(down) if config.num_experts else to.place(*down[0]),
        qkv_bias=to.place(*biases) if config.qkv_bias else None,
        q_norm=to.place(*named("self_attn.q_norm")) if config.qk_norm else None,
        k_norm=to.place(*named("self_attn.k_norm")) if config.qk_norm else None,
        expert_router=to.place(*named(EXPERT_ROUTER)) if config.num_experts else None,
    )


def _rounded(tensor: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    if quantization == "none" or not tensor.numel():
        return tensor
    return quantize(tensor, 8 if quantization == "int8" else 4).dequantized()
