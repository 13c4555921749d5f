"""The device layer: the only place that asks what a step runs on. Everything else takes what is made here.

                          cpu                                    cuda
    kernels               native executor, or torch              Triton, or torch
    sampler               torch                                  Triton
    KV pool               memory untouched until used            device memory
    host tier             the same                               pinned
    blocks of transfer    native copies, checksum in one pass    gathered on the device, then copied
    decode steps          as they come                           CUDA graphs

Triton is imported only where it is to be used: torch's CPU wheels come without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from common.engine.sampler import Sampler, TokenSampler
from common.errors import StartupError
from common.kernels.cpu.block_copy import BlockCopy, load_block_copy
from common.kernels.interface import Kernels
from common.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from common.kvcache.kv_cache import KvCache
    from common.model.interface import Model

DeviceSetting = Literal["auto", "cpu", "cuda"]
KernelSet = Literal["auto", "native", "torch", "triton"]

_HUGE_PAGE_BYTES: Final = 2 << 20


def resolve_device(setting: DeviceSetting) -> torch.device:
    """Raises StartupError where a GPU is asked for and torch finds none."""
    found = torch.cuda.is_available()
    if setting == "cuda" and not found:
        reason = "finds no GPU" if torch.version.cuda else "is built for CPUs only"
        raise StartupError(f"device=cuda, but torch {torch.__version__} here {reason}: --device cpu does without")
    return torch.device("cuda" if found and setting != "cpu" else "cpu")


def takes_native_model(device: torch.device, kernels: KernelSet) -> bool:
    """Whether the native executor is to be tried. Raises StartupError where it is insisted on and can't be."""
    if kernels == "native" and device.type != "cpu":
        raise StartupError("kernels=native computes on CPUs: set device=cpu, or kernels=auto")
    return device.type == "cpu" and kernels in ("auto", "native")


def kernels_for(device: torch.device, kernels: KernelSet) -> Kernels[Any]:
    """Raises StartupError where Triton is needed and missing."""
    if kernels != "triton" and (device.type == "cpu" or kernels == "torch"):
        return ReferenceKernels()
    if importlib.util.find_spec("triton") is None:
        raise StartupError("no Triton here, which GPU kernels need: pip install 'triton>=3.6', or set kernels=torch")
    import triton

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise StartupError(
            "kernels=triton needs a GPU; on a CPU, TRITON_INTERPRET=1 runs them, a thousand times slower"
        )
    from common.kernels.triton.kernels import TritonKernels

    return TritonKernels()


def sampler_for(device: torch.device) -> TokenSampler:
    if device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return Sampler()
    from common.kernels.triton.sampler import TritonSampler

    return TritonSampler()


def with_captured_decodes(
    model: Model, kv_cache: KvCache, kernels: KernelSet, max_running: int, max_model_len: int
) -> Model:
    """On a GPU, `model` with its decode steps on `kv_cache` as CUDA graphs; overwrites nothing there. Else `model`.

    max_running: sequences of a step; max_model_len: tokens of one.
    """
    if kv_cache.device.type == "cpu" or kernels == "torch":
        return model
    from common.kernels.triton.graphs import GraphedModel, cuda_capture, decode_shapes

    shapes = decode_shapes(max_running, -(-max_model_len // kv_cache.layout.block_size))
    return GraphedModel(model, kv_cache, shapes, cuda_capture())


def zeroed_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes]. Raises MemoryError."""
    if device.type == "cpu":
        return lazy_zeros(num_bytes)
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise MemoryError(f"no memory for {num_bytes} bytes on {device}") from None


def host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] beside a pool on `device`, from which the device copies. Raises MemoryError or RuntimeError."""
    if device.type == "cpu":
        return lazy_zeros(num_bytes)
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def device_used_ratio() -> float:
    """Of a GPU's memory; what torch could still hand out counts as free. 0 where no step runs on one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return 1 - (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / total


def release_cached_memory() -> None:
    """Give back what torch keeps of a GPU's memory for later; nothing where no step runs on one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def native_copies(device: torch.device) -> BlockCopy | None:
    """Copies between a pool and packed bytes that are both the CPU's; None where there are none."""
    return load_block_copy() if device.type == "cpu" else None


def gather_words(words: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """words [layers, num_blocks, W], ids int64 [n] → [layers, n, W]."""
    if words.device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return words.index_select(1, ids)
    from common.kernels.triton.block_copy import gather_blocks

    return gather_blocks(words, ids)


def scatter_words(words: torch.Tensor, ids: torch.Tensor, packed: torch.Tensor) -> None:
    """The other way; ids are distinct."""
    if words.device.type == "cpu" or importlib.util.find_spec("triton") is None:
        words.index_copy_(1, ids, packed)
        return
    from common.kernels.triton.block_copy import scatter_blocks

    scatter_blocks(words, ids, packed)


def lazy_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 zeros that take memory only where touched. The tensor keeps the mapping alive."""
    try:
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a KV cache of {num_bytes} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
    return torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=start)
