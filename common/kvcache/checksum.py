"""The checksum of KV bytes on their way: XXH3-64. It guards against faults, not against forgery.

The native copies take it in the same pass (kernels/cpu/native/block_copy.h); this is the same number for all others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash


def checksum_of(data: npt.NDArray[np.uint8]) -> int:
    """data: uint8, contiguous."""
    checksum: int = xxhash.xxh3_64_intdigest(data.data)
    return checksum
