"""Of what kind a lane is, and whether a demand for one kind is met. A lane is "transport/device": "rc_mlx5/mlx5_0:1".

rdma   InfiniBand and RoCE verbs, EFA           cuda   between GPUs of one host
shm    one host: the shared ring, CMA, XPMEM …   tcp    UCX over tcp, and plain sockets
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final


class LaneKind(StrEnum):
    RDMA = "rdma"
    CUDA = "cuda"
    SHM = "shm"
    TCP = "tcp"
    OTHER = "other"


ANY_KIND: Final = "any"
_PREFIXES: Final[tuple[tuple[str, LaneKind], ...]] = (
    *((name, LaneKind.RDMA) for name in ("rc", "ud", "dc", "srd", "gga", "ib", "rdmacm")),
    *((name, LaneKind.CUDA) for name in ("cuda", "gdr")),
    *((name, LaneKind.SHM) for name in ("shared-ring", "cma", "xpmem", "knem", "posix", "sysv", "self", "mm")),
    *((name, LaneKind.TCP) for name in ("tcp", "sockets")),
)


def kind_of(lane: str) -> LaneKind:
    transport = lane.partition("/")[0]
    return next((kind for prefix, kind in _PREFIXES if transport.startswith(prefix)), LaneKind.OTHER)


def unmet(required: str, lanes: Iterable[str]) -> str | None:
    """None where `required` (ANY_KIND or a LaneKind) is met; else one line that names what is wanted and what is there.

    UCX keeps a tcp lane beside a faster one, for wire-up and for keep-alive, and moves bulk by the fastest: so one lane
    of a kind will do, but for tcp, which is met where there is nothing else.
    """
    lanes = tuple(lanes)
    kinds = {kind_of(lane) for lane in lanes}
    met = required == ANY_KIND or (kinds == {LaneKind.TCP} if required == LaneKind.TCP else required in kinds)
    return None if met else f"require_transport is {required}, what is there is {', '.join(lanes) or 'nothing'}"


def unavailable(required: str, devices: Iterable[str]) -> str | None:
    """As `unmet`, of all that this host could use, before any peer is known: tcp is there if any lane of it is."""
    if required == LaneKind.TCP and any(kind_of(device) is LaneKind.TCP for device in devices):
        return None
    return unmet(required, devices)
