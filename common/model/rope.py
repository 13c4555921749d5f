"""Rotary position embedding: the angles. The rotation itself is a kernel."""

from __future__ import annotations

import math

import torch

from common.model.config import Llama3RopeScaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: radians a position, of each pair of dimensions (arXiv:2104.09864)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    return plain if config.rope_scaling is None else _llama3(plain, config.rope_scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated (transformers' "llama3")."""
    waves_in_context = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def cos_sin(inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, head_dim / 2] each. Angles are computed in float32 and rounded last, as transformers does."""
    angles = positions[:, None].float() * inv_freq
    return angles.cos().to(dtype), angles.sin().to(dtype)
