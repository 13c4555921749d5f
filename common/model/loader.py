"""From a Hugging Face folder to a model that computes: on a CPU the native executor where it can be had."""

from __future__ import annotations

from pathlib import Path

import torch

from common.device import KernelSet, kernels_for, takes_native_model
from common.errors import StartupError
from common.kernels.cpu.build import NativeUnavailableError
from common.kernels.cpu.loader import load_native_model
from common.model.config import load_model_config
from common.model.interface import Model
from common.model.llama import LlamaModel
from common.model.quantization import Quantization
from common.model.weights import load_weights
from common.telemetry import get_logger

_log = get_logger(__name__)


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kernels: KernelSet = "torch",
    num_threads: int = 1,
    quantization: Quantization = "none",
) -> Model:
    """Check and load the model in `folder` as `dtype` (float32 or bfloat16) on `device`.

    kernels "auto" takes the native executor on a CPU that can run it, and says in the log why where it can't;
    "native" insists on it. On a GPU it takes Triton's; "torch" computes anywhere. num_threads: the native executor's
    own, the caller's included. quantization: torch rounds the weights to what int8 or int4 can say, and holds them as
    `dtype`.
    Raises StartupError (one line naming the key, tensor and file) before anything is loaded if the folder's content
    isn't a supported, whole model.
    """
    config = load_model_config(folder)
    if takes_native_model(device, kernels):
        try:
            return load_native_model(folder, dtype, num_threads, quantization=quantization)
        except (NativeUnavailableError, ValueError) as error:
            if kernels == "native":
                raise StartupError(f"no native kernels: {error}; --set kernels=torch does without") from None
            _log.warning("no native kernels, torch computes instead, several times slower", reason=str(error))
    chosen = kernels_for(device, kernels)
    return LlamaModel(config, load_weights(folder, config, dtype, device, quantization), chosen)
