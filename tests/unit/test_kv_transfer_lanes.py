"""Lanes by kind, demands for one, and which settings may carry KV to other hosts."""

from __future__ import annotations

import pytest

from common.config import Settings
from common.errors import StartupError
from kv_transfer.transport.lanes import LaneKind, kind_of, unavailable, unmet
from kv_transfer.transport.select import make_transport


@pytest.mark.parametrize(
    ("lane", "kind"),
    [
        ("rc_mlx5/mlx5_0:1", LaneKind.RDMA),
        ("dc_mlx5/mlx5_1:1", LaneKind.RDMA),
        ("ud_verbs/irdma0:1", LaneKind.RDMA),
        ("srd/rdmap0s6:1", LaneKind.RDMA),
        ("cuda_ipc/cuda", LaneKind.CUDA),
        ("cma/memory", LaneKind.SHM),
        ("sysv/memory", LaneKind.SHM),
        ("tcp/eth0", LaneKind.TCP),
        ("sockets/10.0.0.1", LaneKind.TCP),
        ("warp/drive", LaneKind.OTHER),
    ],
)
def test_every_lane_has_a_kind(lane: str, kind: LaneKind) -> None:
    assert kind_of(lane) is kind


def test_a_faster_lane_beside_tcp_meets_the_demand_and_a_silent_fallback_is_named() -> None:
    assert unmet("rdma", ["rc_mlx5/mlx5_0:1", "tcp/eth0"]) is None
    assert unmet("any", []) is None
    problem = unmet("rdma", ["tcp/eth0", "cma/memory"])
    assert problem == "require_transport is rdma, what is there is tcp/eth0, cma/memory"
    assert "nothing" in str(unmet("rdma", []))


def test_tcp_is_demanded_of_the_chosen_lanes_and_only_offered_by_the_devices() -> None:
    assert unmet("tcp", ["tcp/eth0"]) is None
    assert unmet("tcp", ["tcp/lo", "cma/memory"]) is not None
    assert unavailable("tcp", ["tcp/lo", "cma/memory"]) is None
    assert unavailable("shm", ["sockets/127.0.0.1"]) is not None


@pytest.mark.parametrize("where", [{"host": "0.0.0.0"}, {"host": "::"}, {"advertise_host": "decode-1"}])
@pytest.mark.parametrize("transport", ["ucx", "sockets"])
def test_kv_leaves_the_host_in_the_clear_only_where_that_is_chosen_by_name(where: dict, transport: str) -> None:
    with pytest.raises(StartupError, match="transfer_security=plaintext-trusted-network"):
        make_transport(Settings(transfer_transport=transport, **where))
    trusted = Settings(transfer_transport=transport, transfer_security="plaintext-trusted-network", **where)
    assert make_transport(trusted).name == transport


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_on_loopback_nothing_need_be_chosen(host: str) -> None:
    assert make_transport(Settings(host=host)).name == "ucx"
