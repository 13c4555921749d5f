"""One way to a Redis, whatever kind it is: a single server, a Redis Cluster, or a master that Sentinels name.

    redis://[user:password@]HOST:PORT[/DB]   rediss://…   unix:///PATH
    redis+cluster://[user:password@]HOST:PORT[,HOST:PORT…]          rediss+cluster://… likewise
    redis+sentinel://[user:password@]HOST:PORT[,HOST:PORT…]/SERVICE[/DB]

All keys of one Baton cluster share a hash tag (common/registry.py), so in a Redis Cluster they live in one slot, and
scripts and pipelines over several of them are allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self, cast
from urllib.parse import unquote

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException

from common.errors import StartupError

DEFAULT_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
MAX_CONNECTIONS: Final = 16
# Of a Sentinel's pool, which refuses instead of letting its users wait.
MAX_SENTINEL_CONNECTIONS: Final = 256
_FORMS: Final = (
    "write redis://HOST:6379, unix:///PATH, redis+cluster://HOST:6379 or redis+sentinel://HOST:26379/SERVICE"
)


@dataclass(frozen=True, slots=True)
class RedisTimeouts:
    """Seconds. answer None: the caller has bounds of its own. num_retries: of a command whose connection broke."""

    connect_s: float = 1.0
    answer_s: float | None = None
    num_retries: int = 1


@dataclass(frozen=True, slots=True)
class _Many:
    """A url that names several servers."""

    hosts: list[tuple[str, int]]
    user: str | None
    password: str | None
    path: list[str]


class _Cluster(RedisCluster):
    """redis-py tells that no node can be reached by an exception that is no RedisError, nor an OSError."""

    async def initialize(self, *arguments: Any, **options: Any) -> Self:
        try:
            await super().initialize(*arguments, **options)
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from error
        return self


class _MasterBySentinel(Redis):
    """redis-py ends the connections to the master, and leaves those to the Sentinels."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for sentinel in cast(SentinelConnectionPool, self.connection_pool).sentinel_manager.sentinels:
            await sentinel.aclose()


def connect(url: str, timeouts: RedisTimeouts) -> Redis:
    """A client that has dialled nobody yet; the caller owns it, and ends it by aclose(). Values are bytes.

    Typed as Redis: a RedisCluster has the same commands. Raises StartupError for a url that can't be read.
    """
    retry = Retry(NoBackoff(), timeouts.num_retries)
    options: dict[str, Any] = {
        "socket_connect_timeout": timeouts.connect_s,
        "socket_timeout": timeouts.answer_s,
        "retry": retry,
    }
    scheme, _, rest = url.partition("://")
    try:
        if scheme in ("redis+cluster", "rediss+cluster"):
            return _cluster(_parse_many(rest, DEFAULT_PORT), options, ssl=scheme.startswith("rediss"))
        if scheme == "redis+sentinel":
            return _sentinel(_parse_many(rest, SENTINEL_PORT), options)
        pool = BlockingConnectionPool.from_url(
            url, max_connections=MAX_CONNECTIONS, timeout=timeouts.connect_s, **options
        )
        return Redis.from_pool(pool)
    except ValueError as error:
        raise StartupError(f"redis_url is not understood: {error}; {_FORMS}") from None


def place_of(url: str) -> str:
    """Where it leads, without user and password."""
    return url.partition("://")[2].rpartition("@")[2]


def _cluster(many: _Many, options: dict[str, Any], *, ssl: bool) -> Redis:
    if many.path:
        raise ValueError("a Redis Cluster has no numbered databases")
    client = _Cluster(
        startup_nodes=[ClusterNode(host, port) for host, port in many.hosts],
        username=many.user,
        password=many.password,
        ssl=ssl,
        **options,
    )
    return cast(Redis, client)


def _sentinel(many: _Many, options: dict[str, Any]) -> Redis:
    if len(many.path) not in (1, 2):
        raise ValueError("the name of the master that the Sentinels watch is missing")
    timeouts = {key: options[key] for key in ("socket_connect_timeout", "socket_timeout")}
    # A Sentinel that is stopped must not hold everything up.
    timeouts["socket_timeout"] = timeouts["socket_timeout"] or options["socket_connect_timeout"]
    sentinel = Sentinel(many.hosts, sentinel_kwargs=timeouts)  # type: ignore[no-untyped-call]
    database = int(many.path[1]) if len(many.path) == 2 else 0
    client: Redis = sentinel.master_for(
        many.path[0],
        redis_class=_MasterBySentinel,
        username=many.user,
        password=many.password,
        db=database,
        max_connections=MAX_SENTINEL_CONNECTIONS,
        **options,
    )
    return client


def _parse_many(rest: str, default_port: int) -> _Many:
    authority, _, path = rest.partition("/")
    credentials, _, names = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    hosts = []
    for name in names.split(","):
        host, colon, port = name.rpartition(":")
        if not colon or name.endswith("]"):
            host, port = name, str(default_port)
        if not host or not port.isdigit():
            raise ValueError(f"{name!r} is no HOST:PORT")
        hosts.append((host.strip("[]"), int(port)))
    return _Many(hosts, unquote(user) or None, unquote(password) or None, [part for part in path.split("/") if part])
