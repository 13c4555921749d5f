"""Quantised weights: how far codes may be from what they stand for, which tensors have them, and who may share KV."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import resolve_settings
from common.errors import StartupError
from common.kernels.quantization import Bits, quantize, quantize_rows
from common.kvcache.block_hash import hash_seed
from common.kvcache.layout import LAYOUT_NAME, KvLayout
from common.model.config import load_model_config
from common.model.fingerprint import model_fingerprint
from common.model.quantization import GROUP_SIZE, Quantization, parse_quantization, quantization_of
from common.model.weights import load_weights
from deploy.cluster_plan import memory_need
from kv_transfer.types import KvFormat
from tests.tiny_model import make_tiny_model

CPU = torch.device("cpu")


def random_matrix(rows: int, columns: int, seed: int, scale: float, offset: float) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale + offset


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 100),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.0, 1e-12, 0.02, 300.0]),
    offset=st.sampled_from([0.0, -0.3, 5.0]),
)
def test_no_weight_is_further_from_its_code_than_half_a_step(
    rows: int, columns: int, seed: int, scale: float, offset: float
) -> None:
    """Plus what bfloat16 takes of the range: a 256th of a scale times its codes, and of a minimum."""
    matrix = random_matrix(rows, columns, seed, scale, offset)
    eight = quantize(matrix, 8)
    steps = eight.scales.float().repeat_interleave(GROUP_SIZE, 1)[:, :columns]
    assert ((eight.dequantized() - matrix).abs() <= 0.76 * steps + 1e-12).all()
    four = quantize(matrix, 4)
    spread = torch.zeros_like(matrix)
    for first in range(0, columns, GROUP_SIZE):
        group = matrix[:, first : first + GROUP_SIZE]
        spread[:, first : first + GROUP_SIZE] = (group.amax(1) - group.amin(1))[:, None]
    # Least squares may move an end of the range to fit the rest: the mean error of a group stays under half a step.
    error = (four.dequantized() - matrix).square().mean(1).sqrt()
    assert (error <= (spread / 15 * 0.6 + matrix.abs().amax(1)[:, None] / 128).amax(1) + 1e-12).all()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.075)])
def test_the_error_of_normally_distributed_weights(bits: Bits, most: float) -> None:
    matrix = random_matrix(256, 1024, 1, 0.02, 0.0)
    error = ((quantize(matrix, bits).dequantized() - matrix).norm() / matrix.norm()).item()
    assert 0.8 * most < error < most


@pytest.mark.parametrize("bits", [8, 4])
def test_pieces_and_stored_dtype_change_no_code(bits: Bits) -> None:
    """A matrix is quantised some rows at a time: where it is cut must not show."""
    matrix = random_matrix(700, 1000, 2, 1.0, 0.0).bfloat16()
    whole = quantize(matrix, bits)
    part = quantize(matrix[300:310].float(), bits)
    assert torch.equal(whole.codes[300:310], part.codes)
    assert torch.equal(whole.scales[300:310], part.scales)
    assert torch.equal(whole.minima[300:310], part.minima)


@given(seed=st.integers(0, 50), columns=st.integers(1, 90))
def test_rows_of_activations_are_within_half_a_step(seed: int, columns: int) -> None:
    x = random_matrix(3, columns, seed, 2.0, 0.5)
    x[1] = 0.0
    codes, scales = quantize_rows(x)
    back = (codes * scales[..., None]).view(3, -1)
    steps = scales.repeat_interleave(GROUP_SIZE, 1)[:, :columns]
    assert ((back[:, :columns] - x).abs() <= 0.5001 * steps).all()
    assert codes.abs().max() <= 127
    assert not back[:, columns:].any()
    assert not back[1].any()


@pytest.mark.parametrize("tied", [True, False])
def test_which_tensors_are_quantised(tmp_path: Path, tied: bool) -> None:
    config = load_model_config(make_tiny_model(tmp_path, tie_word_embeddings=tied))
    names = {
        "model.layers.0.self_attn.q_proj.weight": ("int8", "int4"),
        "model.layers.1.mlp.down_proj.weight": ("int8", "int4"),
        "lm_head.weight": ("int8", "int8"),
        "model.embed_tokens.weight": ("int8", "int8") if tied else ("none", "none"),
        "model.layers.0.input_layernorm.weight": ("none", "none"),
        "model.norm.weight": ("none", "none"),
    }
    for name, (eight, four) in names.items():
        assert quantization_of(name, config, "int8") == eight
        assert quantization_of(name, config, "int4") == four
        assert quantization_of(name, config, "none") == "none"


def test_torch_holds_the_values_that_codes_stand_for(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = load_model_config(folder)
    plain, rounded = (load_weights(folder, config, torch.float32, CPU, q) for q in ("none", "int4"))
    assert torch.equal(rounded.layers[0].o, quantize(plain.layers[0].o, 4).dequantized())
    assert torch.equal(rounded.lm_head, quantize(plain.lm_head, 8).dequantized())
    assert torch.equal(rounded.embed, plain.embed)
    assert torch.equal(rounded.norm, plain.norm)


def test_kv_of_differently_quantised_models_is_never_exchanged(tmp_path: Path) -> None:
    """Neither by transfer, which names both, nor through the prefix index, whose hashes differ."""
    folder = make_tiny_model(tmp_path)
    layout = KvLayout(2, 16, 2, 16, "bfloat16")
    held: tuple[Quantization, ...] = ("none", "int8", "int4")
    prints = [model_fingerprint(folder, quantization) for quantization in held]
    assert len({hash_seed(fingerprint) for fingerprint in prints}) == 3
    plain, eight, four = (KvFormat(fingerprint, LAYOUT_NAME, layout) for fingerprint in prints)
    assert eight.mismatch(plain) == f"model_fingerprint: '{prints[0]}+int8' here, '{prints[0]}' there"
    assert four.mismatch(eight) == f"model_fingerprint: '{prints[0]}+int4' here, '{prints[0]}+int8' there"
    assert eight.mismatch(eight) is None


def test_an_unknown_quantisation_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match="quantization"):
        resolve_settings({"quantization": "int3"}, environ={})
    with pytest.raises(ValueError, match="int3"):
        parse_quantization("int3")


@pytest.mark.parametrize(("quantization", "expected"), [("none", 200), ("int8", 106), ("int4", 62)])
def test_the_memory_forecast_counts_codes(quantization: str, expected: int) -> None:
    settings = resolve_settings({"quantization": quantization}, environ={}).settings
    assert memory_need(settings, weights_file_bytes=200, file_dtype="bfloat16").weights_bytes == expected
