"""What a process does with its heap once, between starting and serving."""

from __future__ import annotations

import ctypes
import gc


def settle() -> None:
    """Take all objects that live now out of the garbage collector's sight, and give freed memory back to the system.

    Imports and loading leave some 400,000 objects that never die; a full collection that walks them stops every thread
    of the process for 0.1 s and more, in the middle of a step. Call once, when all is loaded and nothing is served.
    """
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
