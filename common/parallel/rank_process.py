"""Ranks 1, 2, … of a tensor-parallel worker: hold a shard, and compute the steps that rank 0 says.

    python -m common.parallel.rank_process FD        FD: the socket to rank 0

Ends when rank 0 closes the socket, at its own first error, and, by the kernel, with the process that started it.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from common.errors import StartupError
from common.kernels.reference import ReferenceKernels
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.kvcache.layout import KvLayout
from common.model.config import load_model_config
from common.model.llama import LlamaModel
from common.model.quantization import parse_quantization
from common.model.shard import Shard
from common.model.weights import load_weights
from common.parallel.batch_codec import decode_batch
from common.parallel.communicator import Communicator
from common.parallel.protocol import READY, RankPlan
from common.parallel.shared_kv import SharedMemory, part_layouts, part_of, pool_bytes
from common.telemetry import configure_logging, get_logger

_CPU = torch.device("cpu")


def main(fd: int) -> None:
    """Runs until rank 0 is gone. Raises StartupError, RuntimeError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: rank 0 says when to end
    connection = Connection(fd)
    plan = msgspec.msgpack.decode(connection.recv_bytes(), type=RankPlan)
    configure_logging(plan.log_level, plan.log_format, f"rank {plan.rank}", plan.name)
    torch.set_num_threads(plan.num_threads)
    shard = Shard(plan.rank, plan.size)
    config = load_model_config(Path(plan.folder))
    weights = load_weights(
        Path(plan.folder), config, TORCH_DTYPES[plan.dtype], _CPU, parse_quantization(plan.quantization), shard
    )
    kv_cache = _kv_part(plan)
    connection.send_bytes(READY)
    model = LlamaModel(config, weights, ReferenceKernels(), Communicator(shard, Path(plan.rendezvous)))
    with torch.inference_mode():
        while True:
            model.forward(decode_batch(connection.recv_bytes(), _CPU), kv_cache)


def _kv_part(plan: RankPlan) -> KvCache:
    config = load_model_config(Path(plan.folder))
    full = KvLayout(config.num_layers, plan.block_size, config.num_kv_heads, config.head_dim, plan.dtype)
    layouts = part_layouts(full, config, plan.size)
    memory = SharedMemory(pool_bytes(layouts, plan.num_blocks), plan.kv_fd)
    memory.close()
    return part_of(memory, layouts, plan.rank, plan.num_blocks)


def _run() -> int:
    try:
        main(int(sys.argv[1]))
    except EOFError:
        return 0
    except StartupError as error:
        get_logger(__name__).error("rank ends", reason=str(error))
    except Exception as error:
        get_logger(__name__).error("rank ends", reason=f"{type(error).__name__}: {' '.join(str(error).split())}")
    return 1


if __name__ == "__main__":
    # Without teardown: gloo's threads would be waited for, and tensors freed one by one.
    os._exit(_run())
