"""Who asks: a tenant with its share, its limits and the hash of its key.

A key has 256 random bits, so one round of SHA-256 is enough at rest: there is nothing that could be guessed.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from typing import Final

import msgspec

KEY_PREFIX: Final = "bt-"
KEY_BYTES: Final = 32
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As stored. key_digest: SHA-256 of its key, hex; "" lets nobody in.

    weight: share of the cluster beside other tenants that wait. requests_per_minute, tokens_per_minute (prompt and
    output), max_concurrent: over all routers; 0: no limit. kv_share: largest part of the decode workers' KV blocks.
    priority_ceiling: most urgent class that it gets (lower is more urgent). cache_group: tenants of one group share
    cached prefixes; "": with nobody.
    """

    name: str
    key_digest: str = ""
    weight: float = 1.0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    kv_share: float = 1.0
    priority_ceiling: int = 0
    cache_group: str = ""
    revoked: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError: one line that names the field."""
        for field, text in (("name", self.name), ("cache_group", self.cache_group)):
            if not _NAME.fullmatch(text) and (field == "name" or text):
                raise ValueError(f"{field} {text[:80]!r} must be 1 to 63 of a-z, 0-9, '-', '_', '.'")
        if not 0.001 <= self.weight <= 1000:
            raise ValueError(f"weight must be from 0.001 to 1000, found {self.weight:g}")
        if not 0 < self.kv_share <= 1:
            raise ValueError(f"kv_share must be above 0, to 1, found {self.kv_share:g}")
        for field in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            if not 0 <= getattr(self, field) <= 1 << 40:
                raise ValueError(f"{field} must be 0 (no limit) or more, found {getattr(self, field)}")
        if not -1000 <= self.priority_ceiling <= 1000:
            raise ValueError(f"priority_ceiling must be from -1000 to 1000, found {self.priority_ceiling}")

    @property
    def cache_scope(self) -> str:
        """What of it goes into the seed of its block hashes. A group can't pose as a tenant."""
        return f"group:{self.cache_group}" if self.cache_group else f"tenant:{self.name}"

    @property
    def has_quota(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent)

    def priority_of(self, asked: int | None) -> int:
        """The class that a request gets: what it asked for, but nothing more urgent than the ceiling."""
        return max(asked or 0, self.priority_ceiling)


class _Anonymous(Tenant, frozen=True):
    @property
    def cache_scope(self) -> str:
        return ""


# Everybody, where no keys are asked for.
ANONYMOUS: Final[Tenant] = _Anonymous("anonymous")


def new_key() -> str:
    """Shown once, to whoever creates the tenant."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_digest(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
