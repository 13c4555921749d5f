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
    """ieee for float32, whose products tensor cores would round to 10 bits. And in Triton's interpreter, which takes
    16-bit floats for integers: products of 16-bit numbers are exact in float32, as on tensor cores."""
    return "ieee" if dtype == torch.float32 or triton.knobs.runtime.interpret else "tf32"
