"""Counter-based random numbers: a pure function of (seed, output index, counter), the same on every worker.

SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), whose n-th output is
mix(state + n * GAMMA), used twice:

    key(seed, i)     output i + 1 of the generator with state mix(seed)
    bits(key, c)     output c + 1 of the generator with state key

so token i of a request needs no generator state, only its number. torch has no unsigned 64-bit arithmetic: sums and
products of int64 wrap modulo 2⁶⁴ just the same, and right shifts are masked to be logical.
"""

from __future__ import annotations

from typing import Final

import torch

_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK_64: Final = (1 << 64) - 1


def random_key(seed: int, output_index: int) -> int:
    """Key of output token `output_index`: a signed 64-bit integer. Of `seed`, the low 64 bits count."""
    return _signed(_mix((_mix(seed & _MASK_64) + (output_index + 1) * _GAMMA) & _MASK_64))


def gumbel_noise(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, of the broadcast shape of keys and counters (int64, counters ≥ 0).

    -log(-log(u)) with u in (0, 1) from the upper 53 bits, so that the values lie within [-3.7, 36.8].
    """
    bits = (counters + 1) * _signed(_GAMMA)
    bits = bits + keys
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits ^= _logical_shift(bits, shift)
        bits *= _signed(factor)
    bits ^= _logical_shift(bits, 31)
    uniform = _logical_shift(bits, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _logical_shift(bits: torch.Tensor, shift: int) -> torch.Tensor:
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * _MIX_1) & _MASK_64
    state = ((state ^ (state >> 27)) * _MIX_2) & _MASK_64
    return state ^ (state >> 31)


def _signed(bits: int) -> int:
    """The signed integer of the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
