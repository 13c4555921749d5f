"""The tenants as this router knows them: read at the start and every few seconds, asked for every request.

A store that can't be read for a while changes nothing: the last state stays in force.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from typing import Final

from common.errors import BatonError, ErrorKind, StartupError
from common.telemetry import get_logger
from router.tenancy.store import TenantStore, TenantStoreError
from router.tenancy.tenant import ANONYMOUS, Tenant, key_digest

REFRESH_S: Final = 2.0
MAX_KEY_CHARS: Final = 512

_log = get_logger(__name__)


class TenantDirectory:
    """store None: everybody is the anonymous tenant. `run` is a task of the router; the rest is synchronous."""

    def __init__(self, store: TenantStore | None) -> None:
        self._store = store
        self._by_digest: dict[str, Tenant] = {}

    async def load(self) -> None:
        """The first read. A file that can't be read raises StartupError; an absent Redis is waited for by `run`."""
        if self._store is not None:
            try:
                self.apply(await self._store.read())
            except TenantStoreError as error:
                if "Redis" not in str(error):
                    raise StartupError(str(error)) from None
                _log.warning("tenants are not known yet: all keys are refused", reason=str(error))

    async def run(self) -> None:
        """Follow the store until cancelled."""
        failing = False
        while self._store is not None:
            await asyncio.sleep(REFRESH_S)
            try:
                self.apply(await self._store.read())
                failing = False
            except TenantStoreError as error:
                if not failing:
                    _log.warning("tenants can't be read; the last known stay in force", reason=str(error))
                failing = True

    def apply(self, tenants: Sequence[Tenant]) -> None:
        """Replace all."""
        self._by_digest = {tenant.key_digest: tenant for tenant in tenants if tenant.key_digest}

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization: Bearer KEY`. Raises UNAUTHENTICATED; PERMISSION_DENIED for a revoked key.

        Keys are found by their digest, whose bytes nobody can choose; so how long it takes tells nothing of a key.
        """
        if self._store is None:
            return ANONYMOUS
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY_CHARS:
            message = "no API key was given: send `Authorization: Bearer KEY` with a key of `baton tenant create`"
            raise BatonError(ErrorKind.UNAUTHENTICATED, message)
        digest = key_digest(key)
        tenant = self._by_digest.get(digest)
        if tenant is None or not hmac.compare_digest(tenant.key_digest, digest):
            raise BatonError(ErrorKind.UNAUTHENTICATED, "the API key is not known here: check it, or ask for a new one")
        if tenant.revoked:
            message = f"the API key of tenant {tenant.name} was revoked: ask the operator for a new one"
            raise BatonError(ErrorKind.PERMISSION_DENIED, message)
        return tenant
