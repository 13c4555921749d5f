"""Matrix products on tensor cores, and how exact they are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a · b with float32 sums. "ieee": operands are widened to float32 first."""
    if PRECISION == "ieee":
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


def precision_of(dtype: torch.dtype) -> str:
    """For float32 three products of split operands (tf32x3): within some 1e-6, and on tensor cores. In Triton's
    interpreter, which takes 16-bit floats for integers, ieee: products of 16-bit numbers are exact in float32."""
    if triton.knobs.runtime.interpret:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
