"""Weights as integers with a scale a group, in plain torch: what the codes are, and what they stand for.

A row [k] is cut into groups of 32, the last one filled up. Each has codes c and, in bfloat16, a scale and a minimum:

    int8   w ≈ scale * (c - 128),     c in 1..255     scale: the group's largest magnitude / 127
    int4   w ≈ scale * c + minimum,   c in 0..15      from the group's range, then two rounds of least squares

Codes are chosen for the rounded scale, so that bfloat16 costs range (under 0.4 %), not accuracy. The refinement is
that of llama.cpp's k-quants (make_qkx2_quants), unweighted: fit scale and minimum to the codes, round anew, keep the
better. It brings normally distributed weights from 7.8 % to 7.4 % error.

Activations beside such weights may be int8 too (dynamic, a scale a row and group): `quantize_rows`. The native kernels
then multiply integers; `linear_int8` is their yardstick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch

from common.model.quantization import GROUP_SIZE

Bits = Literal[8, 4]
INT8_ZERO: Final = 128
_INT4_ROUNDS: Final = 2
# Rows are quantised in pieces of about so many weights: temporaries stay in the cache, and small beside a matrix.
_PIECE_WEIGHTS: Final = 1 << 18
_LEAST_SCALE: Final = 1e-20


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """codes: uint8 [rows, groups * 32], columns past `columns` of no meaning. scales, minima: bfloat16 [rows, groups];
    minima are zero in int8."""

    bits: Bits
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """float32 [rows, columns]."""
        codes = self.codes.view(*self.scales.shape, GROUP_SIZE).float()
        offset = INT8_ZERO if self.bits == 8 else 0
        values = (codes - offset) * self.scales.float()[..., None] + self.minima.float()[..., None]
        return values.view(len(codes), -1)[:, : self.columns]


def quantize(matrix: torch.Tensor, bits: Bits) -> QuantizedMatrix:
    """matrix: [rows, columns], floating point, on a CPU; it is read piece by piece. Not-a-number gives any codes."""
    rows, columns = matrix.shape
    groups = -(-columns // GROUP_SIZE)
    codes = torch.empty(rows, groups * GROUP_SIZE, dtype=torch.uint8)
    scales, minima = (torch.zeros(rows, groups, dtype=torch.bfloat16) for _ in range(2))
    step = max(1, _PIECE_WEIGHTS // (groups * GROUP_SIZE))
    for first in range(0, rows, step):
        piece = _in_groups(matrix[first : first + step])
        part = slice(first, min(rows, first + step))
        if bits == 8:
            found, scale = _int8(piece)
        else:
            found, scale, minimum = _int4(piece)
            minima[part] = minimum.view(-1, groups)
        scales[part] = scale.view(-1, groups)
        codes[part].view(-1, GROUP_SIZE).copy_(found.to(torch.uint8).T)
    return QuantizedMatrix(bits, columns, codes, scales, minima)


class _Int4(NamedTuple):
    """codes: as floats [32, groups], for that scale and minimum; error: squared, a group."""

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    error: torch.Tensor


def _in_groups(piece: torch.Tensor) -> torch.Tensor:
    """float32 [32, rows * groups], contiguous: reductions over short rows are many times slower than down columns.
    The last column is repeated to fill the last group, which so keeps its range."""
    rows, columns = piece.shape
    missing = -columns % GROUP_SIZE
    if missing:
        piece = torch.cat([piece, piece[:, -1:].expand(rows, missing)], dim=1)
    return piece.reshape(-1, GROUP_SIZE).T.float().contiguous()


def _int8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale(w.abs().amax(0) / 127)
    return (w / scale.float()).round_().clamp_(-127, 127).add_(INT8_ZERO), scale


def _int4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = w.amin(0), w.amax(0)
    best = _int4_codes(w, _scale((high - low) / 15), low.bfloat16())
    mean = w.mean(0)
    for _ in range(_INT4_ROUNDS):
        codes = best.codes
        code_mean = codes.mean(0)
        centred = codes - code_mean
        slope = (centred * w).sum(0) / centred.square_().sum(0).clamp_min_(_LEAST_SCALE)
        scale = _scale(slope)
        fitted = _int4_codes(w, scale, (mean - scale.float() * code_mean).bfloat16())
        best = _Int4(*(torch.where(fitted.error < best.error, new, old) for new, old in zip(fitted, best, strict=True)))
    return best.codes, best.scale, best.minimum


def _int4_codes(w: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> _Int4:
    wide_scale, wide_minimum = scale.float(), minimum.float()
    codes = ((w - wide_minimum) / wide_scale).round_().clamp_(0, 15)
    error = (codes * wide_scale).add_(wide_minimum).sub_(w).square_().sum(0)
    return _Int4(codes, scale, minimum, error)


def _scale(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 and above zero: a group of equal weights has no spread."""
    return x.clamp_min(_LEAST_SCALE).bfloat16()


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, k] → int8 codes as float32 [T, groups, 32], float32 scales [T, groups]; what is missing is zero."""
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % GROUP_SIZE)).view(len(x), -1, GROUP_SIZE)
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127).div_(largest), 0)  # 127 / x would be 127 * (1 / x)
    return (wide * inverse[..., None]).round(), largest * (1 / 127)


def linear_int8(x: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    """x [T, columns] · weightᵀ → float32 [T, rows], x quantised by quantize_rows: exact but for the last sums."""
    codes, scales = quantize_rows(x)
    activations = (codes * scales[..., None]).view(len(x), -1).double()
    padded = QuantizedMatrix(weight.bits, weight.codes.shape[1], weight.codes, weight.scales, weight.minima)
    return (activations @ padded.dequantized().double().T).float()
