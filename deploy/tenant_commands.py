"""`baton tenant …`: who may ask, with which share and limits. Routers follow within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from common.config import Settings
from common.errors import StartupError
from deploy.options import takes_settings

tenant_app = typer.Typer(rich_markup_mode=None)

REDIS_ANSWER_S = 5.0
_WHERE = ("redis_url", "cluster", "tenants_file")
Weight = Annotated[float | None, typer.Option(help="share of the cluster beside others that wait [1]")]
Requests = Annotated[int | None, typer.Option(help="requests a minute, over all routers; 0: no limit [0]")]
Tokens = Annotated[int | None, typer.Option(help="prompt and output tokens a minute; 0: no limit [0]")]
Concurrent = Annotated[int | None, typer.Option(help="requests at once, over all routers; 0: no limit [0]")]
KvShare = Annotated[float | None, typer.Option(help="largest part of the decode workers' KV blocks [1]")]
Ceiling = Annotated[int | None, typer.Option(help="most urgent class it gets; lower is more urgent [0]")]
Group = Annotated[str | None, typer.Option(help="tenants of one group share cached prefixes; default: nobody's")]
Name = Annotated[str, typer.Argument(help="a-z, 0-9, '-', '_', '.'", show_default=False)]


@tenant_app.callback(invoke_without_command=True)
def tenant(context: typer.Context) -> None:
    """Tenants: their API keys, shares and limits."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@tenant_app.command()
@takes_settings(*_WHERE)
def create(
    settings: Settings,
    name: Name,
    weight: Weight = None,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    max_concurrent: Concurrent = None,
    kv_share: KvShare = None,
    priority_ceiling: Ceiling = None,
    cache_group: Group = None,
) -> None:
    """Make a tenant and print its key. The key is stored nowhere, only its hash is.

    \b
    Example:
      baton tenant create acme --tokens-per-minute 100000 --max-concurrent 8 --redis-url redis://10.0.0.5:6379
    """
    from router.tenancy.tenant import Tenant, key_digest, new_key

    key = new_key()
    fields = _given(locals(), Tenant)

    def make(known: Tenant | None) -> Tenant:
        if known is not None:
            raise StartupError(f"tenant {name} exists already: see `baton tenant update` and `baton tenant rotate`")
        return Tenant(**{**fields, "key_digest": key_digest(key)})

    _change(settings, name, make)
    typer.echo(key)


@tenant_app.command()
@takes_settings(*_WHERE)
def update(
    settings: Settings,
    name: Name,
    weight: Weight = None,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    max_concurrent: Concurrent = None,
    kv_share: KvShare = None,
    priority_ceiling: Ceiling = None,
    cache_group: Group = None,
) -> None:
    """Change what is named, keep the rest.

    \b
    Example:
      baton tenant update acme --weight 2
    """
    from router.tenancy.tenant import Tenant

    fields = _given(locals(), Tenant)
    _change(settings, name, lambda known: _replaced(known, **fields))


@tenant_app.command()
@takes_settings(*_WHERE)
def rotate(settings: Settings, name: Name) -> None:
    """Print a new key; the old one ends. A revoked tenant is let in again.

    \b
    Example:
      baton tenant rotate acme
    """
    from router.tenancy.tenant import key_digest, new_key

    key = new_key()
    _change(settings, name, lambda known: _replaced(known, name=name, key_digest=key_digest(key), revoked=False))
    typer.echo(key)


@tenant_app.command()
@takes_settings(*_WHERE)
def revoke(settings: Settings, name: Name) -> None:
    """Refuse its key from now on; what runs goes on.

    \b
    Example:
      baton tenant revoke acme
    """
    _change(settings, name, lambda known: _replaced(known, name=name, revoked=True))


@tenant_app.command("list")
@takes_settings(*_WHERE)
def list_(settings: Settings) -> None:
    """One line a tenant, as JSON.

    \b
    Example:
      baton tenant list --tenants-file tenants.json
    """

    async def read(store: Any) -> Any:
        return await store.read()

    for known in sorted(_with_store(settings, read), key=lambda tenant: tenant.name):
        shown = {key: value for key, value in msgspec.to_builtins(known).items() if key != "key_digest"}
        typer.echo(msgspec.json.encode(shown).decode())


def _given(arguments: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Those of a command's arguments that are fields of a tenant and were given."""
    return {key: value for key, value in arguments.items() if key in kind.__struct_fields__ and value is not None}


def _replaced(known: Any, *, name: str, **fields: Any) -> Any:
    if known is None:
        raise StartupError(f"there is no tenant {name}: `baton tenant list` shows all")
    return msgspec.structs.replace(known, **fields)


def _change(settings: Settings, name: str, change: Callable[[Any], Any]) -> None:
    async def work(store: Any) -> None:
        await store.change(name, change)

    _with_store(settings, work)


def _with_store(settings: Settings, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Raises StartupError: one line."""
    from common.redis_client import RedisTimeouts, connect
    from router.tenancy.store import FileTenantStore, RedisTenantStore, TenantStoreError

    async def run() -> Any:
        if settings.tenants_file:
            return await work(FileTenantStore(Path(settings.tenants_file)))
        url = settings.redis_url.get_secret_value()
        if not url:
            raise StartupError("where are the tenants? Pass --tenants-file FILE, or the routers' --redis-url")
        async with connect(url, RedisTimeouts(answer_s=REDIS_ANSWER_S)) as redis:
            return await work(RedisTenantStore(redis, settings.cluster))

    try:
        return asyncio.run(run())
    except (TenantStoreError, ValueError) as error:
        raise StartupError(str(error)) from None
