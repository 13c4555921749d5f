"""From a Hugging Face folder to a NativeModel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from common.kernels.cpu.executor import NativeModel
from common.model.config import load_model_config
from common.model.quantization import Quantization
from common.model.weights import iter_weights


def load_native_model(
    folder: Path,
    dtype: torch.dtype,
    num_threads: int,
    cpus: Sequence[int] | None = None,
    quantization: Quantization = "none",
) -> NativeModel:
    """Check the model in `folder`, then pack it as `dtype` (float32 or bfloat16). For the rest see NativeModel.

    Raises StartupError where the folder's content isn't a supported, whole model; NativeUnavailableError where this
    machine has no compiler or no such CPU: fall back to common.model.loader.load_model.
    """
    config = load_model_config(folder)
    return NativeModel(config, iter_weights(folder, config), dtype, num_threads, cpus=cpus, quantization=quantization)
