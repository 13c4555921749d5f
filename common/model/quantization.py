"""Which matrices a quantised model holds in how many bits. No torch: routers and settings import it.

    int8    every matrix in 8 bits                  int4    the layers' matrices in 4 bits, the output head in 8

The embedding is the output head where they are tied; else it keeps the model's dtype, for a step reads one row a token.
Norms, biases and the routing among experts always keep it.
"""

from __future__ import annotations

from typing import Final, Literal, cast, get_args

from common.model.checkpoint import EMBED, LM_HEAD
from common.model.config import ModelConfig

Quantization = Literal["none", "int8", "int4"]
# Columns of a row that share a scale (and, in int4, a minimum).
GROUP_SIZE: Final = 32
# Bytes a weight: codes, and two bytes for the group's scale, in int4 two more for its minimum.
CODED_BYTES: Final[dict[str, float]] = {"int8": 1 + 2 / GROUP_SIZE, "int4": 0.5 + 4 / GROUP_SIZE}
_MATRICES: Final = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")  # of attention and MLP; of experts


def quantization_of(name: str, config: ModelConfig, quantization: Quantization) -> Quantization:
    """How the tensor `name` of a checkpoint is held in a model quantised so."""
    if name in (EMBED, LM_HEAD):
        own_embedding = name == EMBED and not config.tie_word_embeddings
        return "none" if own_embedding or quantization == "none" else "int8"
    return quantization if name.endswith(_MATRICES) else "none"


def parse_quantization(text: str) -> Quantization:
    """Raises ValueError for any other word than those of Quantization."""
    for known in get_args(Quantization):
        if text == known:
            return cast(Quantization, known)
    raise ValueError(f"quantization {text!r}: none, int8 and int4 are known")
