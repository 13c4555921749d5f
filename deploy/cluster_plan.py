"""What `baton serve` will start, decided before anything starts: parts, their settings, threads and memory. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from common.config import Settings
from common.model.quantization import CODED_BYTES

Role = Literal["router", "prefill", "decode"]
# A worker beside its weights and KV: interpreter, torch and UCX (240 MB here), and the activations of a step.
WORKER_RUNTIME_BYTES: Final = 400 << 20
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the cluster. name: "router", "prefill-0", … settings: all that differ from the defaults."""

    name: str
    role: Role
    worker_id: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a worker needs, and how many workers there are. landing_bytes: of its ring, or of its staging."""

    weights_bytes: int
    kv_cache_bytes: int
    landing_bytes: int
    num_workers: int

    @property
    def total_bytes(self) -> int:
        own = self.weights_bytes + self.kv_cache_bytes + self.landing_bytes
        return self.num_workers * (own + WORKER_RUNTIME_BYTES)


def plan_parts(
    settings: Settings, *, redis_url: str, model: str, port: int, grpc_port: int, num_cores: int, suffix: str = ""
) -> list[Part]:
    """The routers first, then the workers. suffix: makes worker ids unique where clusters share one Redis."""
    given = {key: getattr(settings, key) for key in settings.model_fields_set}
    shared = {**given, "redis_url": redis_url, "model": model}
    threads = worker_threads(num_cores, settings.prefill, settings.decode, settings.num_threads)
    shared["auth"] = effective_auth(settings)
    number = settings.router_processes
    ports = {"port": port, "grpc_port": grpc_port, "worker_id": "", "reuse_port": number > 1}
    shared.setdefault("shared_cores", settings.prefill > 0)
    names = ["router", *(f"router-{i}" for i in range(1, number))]
    parts = [Part(name, "router", "", {**shared, **ports}) for name in names]
    for role, count in (("prefill", settings.prefill), ("decode", settings.decode)):
        for i in range(count):
            own = {"worker_id": f"{role}-{i}{suffix}", "num_threads": threads}
            local = {"host": "127.0.0.1", "advertise_host": "", "grpc_port": 0, "metrics_port": 0}
            parts.append(Part(f"{role}-{i}", role, own["worker_id"], {**shared, **local, **own}))  # type: ignore[arg-type]
    return parts


def effective_auth(settings: Settings) -> str:
    """`baton serve` on loopback asks nobody for a key, unless it is told to: a laptop has one tenant."""
    asked = bool({"auth", "tenants_file"} & settings.model_fields_set)
    return settings.auth if asked or settings.host not in LOOPBACK else "anonymous"


def worker_threads(num_cores: int, num_prefill: int, num_decode: int, setting: int = 0) -> int:
    """Compute threads of each worker: the cores shared among the workers of one phase, unless set.

    Both phases get all cores: with few requests they alternate, a request never being in both, so halving the cores
    would leave half of them idle all the time. Under load the kernel shares them out.
    """
    return setting or max(1, num_cores // max(1, num_prefill, num_decode))


def memory_need(settings: Settings, *, weights_file_bytes: int, file_dtype: str) -> MemoryNeed:
    """weights_file_bytes: of the folder's safetensors files; file_dtype: what they hold (torch's name)."""
    dtype = file_dtype if settings.dtype == "auto" else settings.dtype
    held = CODED_BYTES.get(settings.quantization, DTYPE_BYTES.get(dtype, 4))
    ratio = held / DTYPE_BYTES.get(file_dtype, 2)
    return MemoryNeed(
        weights_bytes=int(weights_file_bytes * ratio),
        kv_cache_bytes=settings.kv_cache_bytes,
        landing_bytes=(settings.landing_slots + settings.pull_slots) * settings.landing_slot_bytes,
        num_workers=settings.prefill + settings.decode,
    )


def to_toml(values: Mapping[str, Any]) -> str:
    """A flat TOML document. Values are str, int, float or SecretStr."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in sorted(values.items()))


def _toml_value(value: Any) -> str:
    if hasattr(value, "get_secret_value"):
        value = value.get_secret_value()
    return json.dumps(value, ensure_ascii=False)  # JSON strings and numbers are TOML too
