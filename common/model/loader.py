"""From a Hugging Face folder to a model that computes."""

from __future__ import annotations

from pathlib import Path

import torch

from common.kernels.reference import ReferenceKernels
from common.model.config import load_model_config
from common.model.llama import LlamaModel
from common.model.weights import load_weights


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """Check and load the model in `folder` as `dtype` (float32 or bfloat16) on `device`.

    Raises StartupError (one line naming the key, tensor and file) before anything is loaded if the folder's content
    isn't a supported, whole model.
    """
    config = load_model_config(folder)
    return LlamaModel(config, load_weights(folder, config, dtype, device), ReferenceKernels())
