"""Quantised products equal their definition for any shape, in every instruction set; a quantised model equals the torch
reference that holds the same rounded weights; and a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.kernels.cpu.build import CpuIsa
from common.kernels.cpu.executor import NativeModel
from common.kernels.cpu.library import check, ffi, load_library
from common.kernels.quantization import Bits, QuantizedMatrix, linear_int8, quantize
from common.model.loader import load_model
from common.model.quantization import Quantization
from tests.tiny_model import make_tiny_model
from tests.unit.test_kernels_cpu import CPU, ISAS, SHAPES, Run, native, ragged_steps, tokens_of

CODED: tuple[Quantization, ...] = ("int8", "int4")
# (rows, columns, features): around a group of 32, a vector, a panel, a tile and a block of rows, and off each.
PRODUCTS = [
    (1, 32, 32), (1, 1, 1), (2, 31, 33), (3, 33, 31), (7, 64, 65), (8, 96, 40), (9, 100, 17), (16, 576, 96),
    (17, 90, 74), (241, 65, 34), (500, 40, 48),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def native_product(isa: CpuIsa, x: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    library: Any = load_library(isa)
    out = torch.empty(len(x), len(weight.codes))
    dtype = library.BATON_F32 if x.dtype == torch.float32 else library.BATON_BF16
    code = library.baton_linear_codes(
        dtype,
        library.BATON_INT8 if weight.bits == 8 else library.BATON_INT4,
        ffi.cast("void *", x.data_ptr()),
        *x.shape,
        ffi.cast("uint8_t *", weight.codes.data_ptr()),
        ffi.cast("uint16_t *", weight.scales.data_ptr()),
        ffi.cast("uint16_t *", weight.minima.data_ptr()),
        len(weight.codes),
        ffi.cast("float *", out.data_ptr()),
    )
    check(library, code, "product")
    return out


def operands(rows: int, columns: int, features: int, bits: Bits) -> tuple[torch.Tensor, QuantizedMatrix]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = torch.randn(features, columns, generator=generator) + 0.1
    x = torch.randn(rows, columns, generator=generator)
    x[0, 0] = 30.0  # an outlier takes its own group's precision, no other's
    x[-1] = 0.0  # a row without scale
    return x, quantize(weight, bits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_a_product_equals_its_definition(isa: CpuIsa, bits: Bits, shape: tuple[int, int, int]) -> None:
    x, weight = operands(*shape, bits)
    rounded = x.bfloat16()
    torch.testing.assert_close(native_product(isa, rounded, weight), linear_int8(rounded, weight), rtol=1e-5, atol=1e-4)
    exact = (x.double() @ weight.dequantized().double().T).float()
    torch.testing.assert_close(native_product(isa, x, weight), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(9, 100, 65), (241, 576, 33)], ids=str)
def test_all_instruction_sets_give_the_same_bits(bits: Bits, shape: tuple[int, int, int]) -> None:
    """Integers are summed exactly, and groups in one order; what VNNI does, 16-bit multiplication does too."""
    x, weight = operands(*shape, bits)
    first, *others = (native_product(isa, x.bfloat16(), weight) for isa in ISAS)
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_has_the_same_bits_in_any_company(isa: CpuIsa, dtype: torch.dtype, bits: Bits) -> None:
    x, weight = operands(33, 200, 70, bits)
    together = native_product(isa, x.to(dtype), weight)
    for rows in range(1, 20):
        assert torch.equal(native_product(isa, x[:rows].to(dtype).contiguous(), weight), together[:rows])


@pytest.fixture(scope="module", params=["odd_sizes", "head_dim_80", "long_sums"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied and not, heads that are no multiple of a group, sums of many groups."""
    path = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(path, max_position_embeddings=1024, **SHAPES[request.param])


@pytest.mark.parametrize("quantization", CODED)
def test_a_float32_model_equals_the_reference_with_rounded_weights(folder: Path, quantization: Quantization) -> None:
    reference = Run(load_model(folder, torch.float32, CPU, quantization=quantization))
    plain = Run(load_model(folder, torch.float32, CPU))
    run = Run(native(folder, torch.float32, quantization=quantization))
    for step in ragged_steps():
        expected = reference.step(*step)
        torch.testing.assert_close(run.step(*step), expected, rtol=1e-4, atol=2e-4)
        assert not torch.allclose(plain.step(*step), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantization", CODED)
def test_int8_activations_cost_a_bfloat16_model_little(folder: Path, quantization: Quantization) -> None:
    reference = Run(load_model(folder, torch.float32, CPU, quantization=quantization))
    run = Run(native(folder, torch.bfloat16, quantization=quantization))
    pairs = [(run.step(*step), reference.step(*step)) for step in ragged_steps()]
    got, expected = (torch.cat(side) for side in zip(*pairs, strict=True))
    assert 0 < (got - expected).norm() < 0.1 * expected.norm()


LENGTH = 300
PROMPT = tokens_of(5, LENGTH)


@pytest.fixture(
    scope="module",
    params=[(q, dtype) for q in CODED for dtype in (torch.bfloat16, torch.float32)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    quantization, dtype = request.param
    folder = make_tiny_model(tmp_path_factory.mktemp("plain"), max_position_embeddings=1024)
    return native(folder, dtype, quantization=quantization)


def test_chunks_and_company_change_no_bit(model: NativeModel) -> None:
    """In one step, in chunks, and token by token beside many others: codes are made by a phase of their own for many
    rows, by each thread for few."""
    whole, chunked, crowded = Run(model), Run(model), Run(model)
    expected = whole.step({0: PROMPT})
    for first, last in ((0, 7), (7, 180), (180, 281), (281, LENGTH)):
        logits = chunked.step({0: PROMPT[first:last]})
    assert torch.equal(logits, expected)
    assert torch.equal(chunked.kv(0), whole.kv(0))
    crowded.step({0: PROMPT[: LENGTH - 20]})
    for i, token in enumerate(PROMPT[-20:]):
        logits = crowded.step({0: [token]} | {name: [(token + name) % 300] for name in range(1, 1 + i)})
    assert torch.equal(logits[0], expected[0])
    assert torch.equal(crowded.kv(0), whole.kv(0))


def test_quantised_weights_take_fewer_bytes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=512, intermediate_size=4096)
    plain, eight, four = (native(folder, torch.bfloat16, quantization=q).memory_bytes for q in ("none", "int8", "int4"))
    assert plain > eight > four


def test_plain_weights_are_refused_where_codes_belong(tmp_path: Path) -> None:
    """And the other way round: a mix-up inside the executor is an error, never a model of noise."""
    folder = make_tiny_model(tmp_path)
    model = native(folder, torch.float32, quantization="int8")
    model._quantization = "none"
    with pytest.raises(ValueError, match="q_proj"):
        model._load("model.layers.0.self_attn.q_proj.weight", torch.zeros(64, 64))
