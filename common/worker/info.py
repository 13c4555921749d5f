"""What a worker says of itself: to routers by GetInfo and Welcome, in its registry record, and in its metrics."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from common.registry import Role, WorkerRecord

# A worker's sessions hear from it at least so often.
BEAT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation. num_blocks, block_size: of its KV pool. metrics_url: empty if it has none.

    pull_secret: who shows it may ask this worker for cached blocks; told to routers only, through the registry.
    """

    worker_id: str
    epoch: str
    role: Role
    grpc_address: str
    metrics_url: str
    model_name: str
    model_fingerprint: str
    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    pull_secret: bytes = b""
    has_host_tier: bool = False

    def record(self, *, draining: bool) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            grpc_address=self.grpc_address,
            model_name=self.model_name,
            model_fingerprint=self.model_fingerprint,
            dtype=self.dtype,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            metrics_url=self.metrics_url,
            draining=draining,
            pull_secret=self.pull_secret.hex(),
            has_host_tier=self.has_host_tier,
        )


def new_epoch() -> str:
    """16 hex digits, never given twice."""
    return secrets.token_hex(8)
