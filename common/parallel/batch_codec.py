"""A step's batch as bytes for the other ranks: a few kilobytes, whatever the model."""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from common.engine.batch import Batch
from common.parallel.protocol import StepFrame

_FIELDS: Final[dict[str, torch.dtype]] = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "query_start": torch.int32,
    "seq_lens": torch.int32,
    "block_tables": torch.int32,
    "logits_rows": torch.int64,
}


def encode_batch(batch: Batch) -> bytes:
    fields = {name: getattr(batch, name).cpu().contiguous().numpy().tobytes() for name in _FIELDS}
    return msgspec.msgpack.encode(StepFrame(batch.num_sequences, **fields))


def decode_batch(data: bytes, device: torch.device) -> Batch:
    frame = msgspec.msgpack.decode(data, type=StepFrame)
    tensors = {name: _tensor(getattr(frame, name), dtype).to(device) for name, dtype in _FIELDS.items()}
    tensors["block_tables"] = tensors["block_tables"].view(frame.num_sequences, -1)
    return Batch(**tensors)


def _tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
