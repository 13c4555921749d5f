"""Where tenants are kept: a JSON file, or a hash in the cluster's Redis. Few writers (people), many readers (routers).

baton:{C}:tenants    HASH of name → Tenant (JSON)
FILE                 {"tenants": [Tenant, …]}, replaced as a whole
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.tenancy.tenant import Tenant

MAX_TENANTS: Final = 10_000
MAX_FILE_BYTES: Final = 16 << 20
READ_TIMEOUT_S: Final = 5.0

# The stored tenant, None where there is none, to what takes its place.
Change = Callable[[Tenant | None], Tenant]


class TenantStoreError(Exception):
    """One line: what can't be read or written, and why."""


class TenantStore(Protocol):
    """Raises TenantStoreError."""

    async def read(self) -> list[Tenant]: ...

    async def change(self, name: str, change: Change) -> Tenant:
        """Replace one tenant; what `change` raises leaves all as it was."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[Tenant]


class FileTenantStore:
    """Readers see the old file or the new one, never a part; writers wait for each other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> list[Tenant]:
        return await asyncio.to_thread(self._read)

    async def change(self, name: str, change: Change) -> Tenant:
        return await asyncio.to_thread(self._change, name, change)

    def _read(self) -> list[Tenant]:
        try:
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise TenantStoreError(f"{self._path} is larger than {MAX_FILE_BYTES >> 20} MiB")
            return _checked(msgspec.json.decode(self._path.read_bytes(), type=_File).tenants, str(self._path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TenantStoreError(f"can't read {self._path}: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise TenantStoreError(f"{self._path} is no file of tenants: {error}") from None

    def _change(self, name: str, change: Change) -> Tenant:
        with self._locked():
            by_name = {tenant.name: tenant for tenant in self._read()}
            by_name[name] = changed = change(by_name.get(name))
            tenants = _checked([by_name[key] for key in sorted(by_name)], str(self._path))
            self._replace(msgspec.json.format(msgspec.json.encode(_File(tenants))) + b"\n")
            return changed

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._path.with_name(self._path.name + ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise TenantStoreError(f"can't write beside {self._path}: {error.strerror}") from None

    def _replace(self, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


class RedisTenantStore:
    """redis: the caller's, who closes it."""

    def __init__(self, redis: Redis, cluster: str) -> None:
        self._redis = redis
        self._key = f"baton:{{{cluster}}}:tenants"

    async def read(self) -> list[Tenant]:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                values = await self._redis.hvals(self._key)
            return _checked([msgspec.json.decode(value, type=Tenant) for value in values], self._key)
        except (RedisError, OSError, TimeoutError) as error:
            raise TenantStoreError(f"can't read tenants from Redis: {error or type(error).__name__}") from None
        except msgspec.DecodeError as error:
            raise TenantStoreError(f"{self._key} in Redis holds no tenants: {error}") from None

    async def change(self, name: str, change: Change) -> Tenant:
        """Two people who change one tenant at the same moment: the later one wins."""
        by_name = {tenant.name: tenant for tenant in await self.read()}
        by_name[name] = changed = change(by_name.get(name))
        _checked(list(by_name.values()), self._key)
        try:
            await self._redis.hset(self._key, name, msgspec.json.encode(changed))
        except (RedisError, OSError) as error:
            raise TenantStoreError(f"can't write the tenant to Redis: {error}") from None
        return changed


def _checked(tenants: list[Tenant], where: str) -> list[Tenant]:
    if len(tenants) > MAX_TENANTS:
        raise TenantStoreError(f"{where} holds {len(tenants)} tenants; at most {MAX_TENANTS} are allowed")
    if len({tenant.name for tenant in tenants}) != len(tenants):
        raise TenantStoreError(f"{where} holds two tenants of one name")
    return tenants
