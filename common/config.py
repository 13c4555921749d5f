"""Settings of every role: CLI > BATON_* environment > TOML file > default. An unknown key is an error, wherever it is.

One flat, frozen set serves all commands; each reads the fields it needs. `baton check-config` prints the effective set.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from common.errors import StartupError

ENV_PREFIX: Final = "BATON_"
# Names the settings file: not a setting itself.
ENV_RESERVED: Final = frozenset({"BATON_CONFIG"})


class Settings(BaseModel):
    """Units stand in names. Addresses are what this process binds; `advertise_host` is what others dial."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # where
    host: str = Field("127.0.0.1", description="address that HTTP and gRPC listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port of the router")
    grpc_port: int = Field(
        0, ge=0, le=65535, description="gRPC port (router: public API; worker: sessions); 0 picks a free one"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="a worker's Prometheus port; 0 picks a free one")
    advertise_host: str = Field("", description="address that peers dial; default: host")
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://…, unix://…, redis+cluster://… or redis+sentinel://…; empty: `baton serve` starts its own",
    )
    index_max_blocks: int = Field(
        1 << 20, ge=1, description="most KV blocks that a worker enters in the prefix index; each takes Redis 64 bytes"
    )
    cluster: str = Field(
        "default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="name that separates clusters in one Redis"
    )
    worker_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9_.-]{0,64}$",
        description="stable name of this worker; default: role and a random suffix",
    )

    # who may ask
    auth: Literal["keys", "anonymous"] = Field(
        "keys", description="keys: only tenants' API keys (`baton tenant`); anonymous: everybody, without limits"
    )
    tenants_file: str = Field("", description="JSON file of the tenants; empty: they are kept in Redis")

    # what
    model: str = Field("", description="Hugging Face folder; empty: the default model, fetched on first use")
    served_model_name: str = Field("", description="name in the API; default: the folder's name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="weights and KV cache; auto: as the model says"
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="weights in 8 or 4 bits; the same in routers and workers"
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=16,
        description="processes that a worker's model is shared out to; prefill and decode workers may differ",
    )
    max_model_len: int = Field(0, ge=0, description="context in tokens; 0: the model's own")

    # how many (baton serve)
    prefill: int = Field(1, ge=0, le=64, description="prefill workers of the local cluster")
    decode: int = Field(1, ge=1, le=64, description="decode workers of the local cluster")

    router_processes: int = Field(
        1, ge=1, le=64, description="routers of the local cluster, all on the same ports (SO_REUSEPORT)"
    )
    reuse_port: bool = Field(False, description="a router shares its ports with others on this machine")

    # KV memory and scheduling
    block_size: int = Field(16, ge=1, le=256, description="tokens a KV block")
    kv_cache_bytes: int = Field(512 << 20, ge=1 << 20, description="bytes of KV cache a worker preallocates")
    host_kv_bytes: int = Field(
        0,
        ge=0,
        description="bytes of host memory for KV blocks that the pool evicts; 0: none. On CPUs a larger pool does more",
    )
    prefill_budget_tokens: int = Field(2048, ge=16, description="most tokens a prefill step computes")
    prefill_step_target_ms: float = Field(
        200.0,
        ge=0,
        description="a prefill step shall take no longer: its tokens are cut to that; 0: only the bound above",
    )
    itl_target_ms: float = Field(
        50.0,
        ge=0,
        description="a decode worker's step shall take no longer: chunks beside decodes are cut to that; 0: off",
    )
    max_running: int = Field(64, ge=1, description="most sequences a worker runs at once")
    max_waiting: int = Field(
        1024, ge=1, description="most sequences a worker lets wait; most requests a router has in flight"
    )
    max_choices: int = Field(
        16, ge=1, le=128, description="most continuations (n, best_of) of one prompt; no more than max_running"
    )
    local_prefill_max_tokens: int = Field(
        512,
        ge=0,
        description="a decode worker may compute so many uncached prompt tokens itself where that is sooner; 0: never",
    )
    shared_cores: bool = Field(
        False,
        description="prefill workers share the decode workers' cores, and get only what these may not compute; "
        "`baton serve`: true",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what computes; auto: a GPU, where there is one")
    kernels: Literal["auto", "native", "torch", "triton"] = Field(
        "auto", description="native: compiled for this CPU; triton: for GPUs; auto: either, where it can be had"
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture decode steps at the start and replay them")
    num_threads: int = Field(
        0, ge=0, le=256, description="compute threads of a worker; 0: all cores, or `baton serve`'s share of them"
    )
    nice: int = Field(0, ge=0, le=19, description="how far a worker gives way to others on the same cores")

    check_when_idle: bool = Field(
        False, description="recount all blocks whenever an engine has nothing to do; a fault ends the worker. For tests"
    )

    # transfer
    landing_slots: int = Field(16, ge=2, le=1 << 16, description="slots of a decode worker's landing ring")
    landing_slot_bytes: int = Field(4 << 20, ge=64 << 10, le=1 << 30, description="bytes of one landing slot")
    transfer_lease_s: float = Field(2.0, gt=0, description="silence after which a transfer's peer counts as dead")
    transfer_transport: Literal["ucx", "sockets"] = Field(
        "ucx", description="what moves KV: UCX, or plain TCP sockets on hosts without it; the same on all workers"
    )
    require_transport: Literal["any", "rdma", "cuda", "shm", "tcp"] = Field(
        "any", description="kind of lane that KV must travel by: without it a worker refuses to start or to send"
    )
    transfer_security: Literal["loopback-only", "plaintext-trusted-network"] = Field(
        "loopback-only", description="a worker whose host or advertise_host is not loopback starts with the latter only"
    )
    pull_prefixes: Literal["auto", "off"] = Field(
        "auto", description="fetch a cached prefix from another worker where that is cheaper than computing it"
    )
    ucx_library: str = Field("", description="path of libucp; empty: the system's, then the wheel's")
    ucx_net_devices: str = Field("", description="UCX_NET_DEVICES; empty: lo on loopback, else UCX's choice")

    # admission: what a router sends to the workers at once follows what it measures, against these
    target_ttft_ms: float = Field(250.0, gt=0, description="time to first token, from a request's turn on")
    target_itl_ms: float = Field(30.0, gt=0, description="time between a stream's tokens")

    # deadlines
    request_timeout_s: float = Field(600.0, gt=0, description="default and upper bound of a request's deadline")
    shutdown_grace_s: float = Field(
        3.0, ge=0, description="time that running requests get when a process is told to stop"
    )

    # health
    engine_stall_s: float = Field(
        2.0,
        gt=0,
        description="silence of a worker's engine after which it is unready (a long step is allowed more)",
    )
    engine_exit_s: float = Field(
        10.0, gt=0, description="silence of a worker's engine after which the worker ends, to be started again"
    )
    canary_interval_s: float = Field(
        5.0, ge=0, description="an idle engine computes a token so often, to see whether it still can; 0: never"
    )
    memory_close_ratio: float = Field(
        0.95, gt=0, le=1, description="part of the memory in use from which a worker takes nothing new; 1: off"
    )
    worker_silence_s: float = Field(
        0.8, gt=0, description="silence of a worker after which a router takes its requests elsewhere"
    )
    watchdog_s: float = Field(
        10.0,
        ge=0,
        description="silence of a part of `baton serve` after which it is restarted; 0: never",
    )

    # logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["console", "json"] = Field("console", description="lines for people, or JSON objects")

    # traces
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://[^\s/]+/?)?$",
        description="OTLP/gRPC collector of traces, http://HOST:4317; empty: no traces",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="part of the requests that is traced where the client did not decide"
    )
    timeline_entries: int = Field(
        2048, ge=0, le=1 << 20, description="ended requests whose timeline a router can still tell"
    )

    @property
    def pull_slots(self) -> int:
        """Of the second landing ring, or second staging, that a worker has for pulls: a quarter of the first's."""
        return max(2, self.landing_slots // 4) if self.pull_prefixes == "auto" else 0

    @property
    def dial_host(self) -> str:
        return self.advertise_host or self.host


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings and, for each key that is not at its default, where its value came from."""

    settings: Settings
    origin: Mapping[str, str]


def resolve_settings(
    cli: Mapping[str, Any], *, config: Path | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:
    """Merge the four sources. None in `cli` means not given. Raises StartupError naming source, key and remedy."""
    env = os.environ if environ is None else environ
    path = config or (Path(env["BATON_CONFIG"]) if env.get("BATON_CONFIG") else None)
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, values in (
        (f"file {path}", _read_toml(path) if path else {}),
        ("environment", _read_env(env)),
        ("command line", {k: v for k, v in cli.items() if v is not None}),
    ):
        for key, value in values.items():
            if key not in Settings.model_fields:
                raise StartupError(_unknown_key(key, source))
            merged[key] = value
            origin[key] = source
    try:
        return Resolved(Settings(**merged), origin)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise StartupError(f"bad value for {key!r} in {origin.get(key, 'defaults')}: {first['msg']}") from None


def _unknown_key(key: str, source: str) -> str:
    name = f"{ENV_PREFIX}{key.upper()}" if source == "environment" else key
    close = difflib.get_close_matches(key, Settings.model_fields, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown setting {name!r} in {source}: {hint}`baton check-config` lists the known ones"


def _read_env(env: Mapping[str, str]) -> dict[str, str]:
    return {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in env.items()
        if key.startswith(ENV_PREFIX) and key not in ENV_RESERVED
    }


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"can't read the settings file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"settings file {path} is not TOML: {error}") from None
