"""What rank 0 tells the other ranks: once, what they are; then step by step, what to compute. No torch.

    rank 0 ── RankPlan ──► rank r        rank r ── READY ──► rank 0        rank 0 ── batch ──► rank r … end of file: go

Over a socket pair each. What they compute with one another goes by the communicator.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

READY: Final = b"ready"


class RankPlan(msgspec.Struct, frozen=True):
    """kv_fd: of the shared memory that holds all ranks' KV; it came with the process."""

    rank: int
    size: int
    folder: str
    dtype: str
    quantization: str
    block_size: int
    num_blocks: int
    kv_fd: int
    rendezvous: str
    num_threads: int
    log_level: str
    log_format: Literal["console", "json"]
    name: str


class StepFrame(msgspec.Struct, frozen=True, array_like=True):
    """A Batch, field by field, as the bytes of its tensors; num_sequences tells block_tables' rows."""

    num_sequences: int
    token_ids: bytes
    positions: bytes
    slot_mapping: bytes
    query_start: bytes
    seq_lens: bytes
    block_tables: bytes
    logits_rows: bytes
