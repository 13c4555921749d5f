"""The Redis schema that workers write and routers read: registry records and the prefix index's keys.

    baton:{C}:workers                        SET of worker ids that were ever seen alive (collected by routers)
    baton:{C}:worker:<worker_id>             WorkerRecord (JSON); expires with the worker's lease
    baton:{C}:blocks:<worker_id>:<epoch>     SET of the 16-byte hashes that the worker holds, in whichever tier
    baton:{C}:host:<worker_id>:<epoch>       SET of those that its host tier holds; only where it has such a tier
    baton:{C}:sequence:<worker_id>:<epoch>   number of the last batch of changes to these two
    baton:{C}:reread:<worker_id>:<epoch>     set by a router that found the index wrong: the worker writes it anew

All but the first expire with the worker's lease. Each key but the last has one writer, the worker. A new epoch is a new
key, so a restarted worker's old entries are dead at once.
`{C}` is the cluster name in a hash tag: all keys of a cluster live in one Redis Cluster slot.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Role = Literal["prefill", "decode"]
LEASE_S: Final = 3.0
RENEW_S: Final = 1.0


class WorkerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One incarnation of a worker, as it announces itself.

    grpc_address: "host:port" of its WorkerService (and, for decode, TransferService). metrics_url: "" if none.
    pull_secret: hex; what a worker must show to be sent cached blocks. "" where nothing is lent.
    """

    worker_id: str
    epoch: str
    role: Role
    grpc_address: str
    model_name: str
    model_fingerprint: str
    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    metrics_url: str = ""
    draining: bool = False
    has_host_tier: bool = False
    pull_secret: str = ""


def workers_key(cluster: str) -> str:
    return f"baton:{{{cluster}}}:workers"


def worker_key(cluster: str, worker_id: str) -> str:
    return f"baton:{{{cluster}}}:worker:{worker_id}"


def blocks_key(cluster: str, worker_id: str, epoch: str) -> str:
    return f"baton:{{{cluster}}}:blocks:{worker_id}:{epoch}"


def host_blocks_key(cluster: str, worker_id: str, epoch: str) -> str:
    return f"baton:{{{cluster}}}:host:{worker_id}:{epoch}"


def sequence_key(cluster: str, worker_id: str, epoch: str) -> str:
    return f"baton:{{{cluster}}}:sequence:{worker_id}:{epoch}"


def reread_key(cluster: str, worker_id: str, epoch: str) -> str:
    return f"baton:{{{cluster}}}:reread:{worker_id}:{epoch}"


def encode_record(record: WorkerRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> WorkerRecord:
    """Raises msgspec.ValidationError / DecodeError on foreign content."""
    return msgspec.json.decode(data, type=WorkerRecord)
