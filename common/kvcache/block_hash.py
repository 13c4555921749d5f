"""Salted, chained 128-bit block hashes: the identity of a block's content in every cache and index.

    seed ──► hash(block 0) ──► hash(block 1) ──► …
    block_hash = BLAKE2b-128(parent_hash ‖ token_ids as little-endian u32)        (RFC 7693)
    seed       = BLAKE2b-128(tagged fields: model fingerprint, scope, adapter, and the tenant where there is one)

Equal hashes mean: same model, same scope, same tokens from the very start. Only full blocks have a hash. Fields are
tagged and length-prefixed, so that no value of one field can pose as another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

HASH_BYTES: Final = 16


def hash_seed(model_fingerprint: str, scope: str = "", adapter: str = "", tenant: str = "") -> bytes:
    """Parent of every chain's first block; 16 bytes. scope: the client's own salt. tenant: its cache scope."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"baton-kv-seed-v1")
    fields = [("model", model_fingerprint), ("scope", scope), ("adapter", adapter)]
    if tenant:
        fields.append(("tenant", tenant))
    for tag, value in fields:
        data = value.encode()
        digest.update(f"{tag}:{len(data)}:".encode() + data)
    return digest.digest()


def chain_hashes(parent_hash: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, in order; the incomplete tail has none. O(len(token_ids))."""
    num_blocks = len(token_ids) // block_size
    data = np.asarray(token_ids[: num_blocks * block_size], dtype="<u4").tobytes()
    step = block_size * 4
    hashes: list[bytes] = []
    for start in range(0, num_blocks * step, step):
        parent_hash = blake2b(parent_hash + data[start : start + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent_hash)
    return hashes
