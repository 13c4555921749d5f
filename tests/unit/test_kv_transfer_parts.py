"""The small parts: staging pool, lease, outbox, state tables, lanes, devices, library lookup."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.lease import TICKS_PER_LEASE, Lease
from kv_transfer.outbox import MAX_PER_MESSAGE, MAX_WAITING, Outbox
from kv_transfer.staging_pool import StagingPool
from kv_transfer.state import INCOMING_MOVES, OUTGOING_MOVES, IncomingState, OutgoingState, is_final
from kv_transfer.transport import ucx_abi
from kv_transfer.transport.base import TransportError, TransportFault
from kv_transfer.transport.ucx_abi import load_libucp
from kv_transfer.transport.ucx_endpoint import parse_lanes
from kv_transfer.transport.ucx_worker import net_devices_for


def nothing() -> None:
    pass


def test_a_peer_holds_its_share_of_the_staging_pool_and_no_more() -> None:
    pool = StagingPool(4, max_held=2)
    assert [pool.take("slow", nothing) is None for _ in range(3)] == [False, False, True]
    assert [pool.take("quick", nothing) is None for _ in range(3)] == [False, False, True]


def test_who_waits_for_a_staging_slot_is_woken_in_turn_and_never_forgotten() -> None:
    pool = StagingPool(1, max_held=1)
    slot = pool.take("a", nothing)
    assert slot is not None
    woken: list[str] = []
    # b has lost its use for a slot by the time it is woken; c has not.
    assert pool.take("b", lambda: woken.append("b")) is None
    assert pool.take("c", lambda: woken.append(f"c {pool.take('c', nothing)}")) is None
    pool.give("a", slot)
    assert woken == ["b", f"c {slot}"]


def test_a_peer_that_is_gone_is_not_woken() -> None:
    pool = StagingPool(1, max_held=1)
    slot = pool.take("a", nothing)
    assert slot is not None
    woken: list[str] = []
    pool.take("b", lambda: woken.append("b"))
    pool.forget("b")
    pool.give("a", slot)
    assert woken == []


def test_silence_for_a_lease_loses_it_and_not_before_most_of_it() -> None:
    lease = Lease(2.0)
    ticks = [lease.tick(lease.tick_s) for _ in range(TICKS_PER_LEASE)]
    assert ticks == [True] * (TICKS_PER_LEASE - 2) + [False, False]


def test_any_frame_renews_the_lease() -> None:
    lease = Lease(2.0)
    for _ in range(50):
        assert lease.tick(lease.tick_s)
        lease.heard()


def test_a_stall_of_our_own_is_not_the_peers_silence() -> None:
    lease = Lease(2.0)
    assert lease.tick(3600.0)
    assert lease.tick(lease.tick_s)


def test_heartbeats_are_due_when_either_side_is_quiet() -> None:
    lease = Lease(2.0)
    lease.tick(lease.tick_s)
    assert not lease.heartbeat_due
    lease.tick(lease.tick_s)
    assert lease.heartbeat_due
    lease.sent()
    assert lease.heartbeat_due  # the peer has said nothing either
    lease.heard()
    assert not lease.heartbeat_due


async def test_the_outbox_gives_what_has_gathered_in_order_and_in_bounded_messages() -> None:
    outbox: Outbox[int] = Outbox()
    for number in range(MAX_PER_MESSAGE + 2):
        assert outbox.put(number)
    assert await outbox.take() == list(range(MAX_PER_MESSAGE))
    assert await outbox.take() == [MAX_PER_MESSAGE, MAX_PER_MESSAGE + 1]
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(7)
    assert await waiting == [7]
    outbox.put(8)
    outbox.close()
    outbox.put(9)
    assert [await outbox.take(), await outbox.take()] == [[8], []]


async def test_the_outbox_is_bounded() -> None:
    outbox: Outbox[int] = Outbox()
    assert all(outbox.put(0) for _ in range(MAX_WAITING))
    assert not outbox.put(0)


@pytest.mark.parametrize(("moves", "first"), [(INCOMING_MOVES, "reserved"), (OUTGOING_MOVES, "opening")])
def test_every_state_is_reached_and_every_transfer_can_end(moves: dict, first: str) -> None:
    states = set(moves)
    reachable = {state for state in states if state == first}
    for _ in states:
        reachable |= {after for state in reachable for after in moves[state]}
    assert reachable == states
    for state in states:
        assert is_final(state) or any(is_final(after) for after in moves[state])


def test_final_states_are_final() -> None:
    assert {s for s in IncomingState if is_final(s)} == {"committed", "aborted", "expired"}
    assert {s for s in OutgoingState if is_final(s)} == {"done", "failed", "aborted"}


def test_lanes_are_read_from_ucx_reports() -> None:
    report = """
#               peer: <no debug data>
#                 lane[0]:  1:tcp/lo.0 md[1]                -> md[1]/tcp/sysdev[255] seg 4294967295 am keepalive wireup
#                 lane[1]:  4:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] rma_bw#0
#                 lane[2]: 12:rc_mlx5/mlx5_0:1.0 md[6]      -> md[6]/ib/sysdev[3] rma_bw#1
# | ucp_context_0 intra-node cfg#0                                      |
"""
    assert parse_lanes(report) == ("tcp/lo", "cma/memory", "rc_mlx5/mlx5_0:1")
    assert parse_lanes("") == ()


@pytest.mark.parametrize(
    ("configured", "host", "expected"),
    [
        ("", "127.0.0.1", "lo"),
        ("", "::1", "lo"),
        ("", "localhost", "lo"),
        ("", "10.0.0.4", ""),
        ("", "worker-3", ""),
        ("mlx5_0:1", "127.0.0.1", "mlx5_0:1"),
    ],
)
def test_loopback_services_use_the_loopback_device(configured: str, host: str, expected: str) -> None:
    assert net_devices_for(configured, host) == expected


@pytest.mark.parametrize(("system", "chosen"), [((), "wheel"), ((1, 13, 1), "wheel"), ((1, 14, 0), "system")])
def test_the_systems_library_is_preferred_unless_it_is_too_old(
    monkeypatch: pytest.MonkeyPatch, system: tuple[int, ...], chosen: str
) -> None:
    monkeypatch.setattr(ucx_abi, "_probe_system_version", lambda: system)
    monkeypatch.setattr(ucx_abi, "_load_from_wheel", lambda: (None, "wheel"))
    monkeypatch.setattr(ucx_abi, "SYSTEM_LIBRARY", "libc.so.6")
    assert load_libucp()[1] == ("libc.so.6" if chosen == "system" else chosen)


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match=r"/nowhere/libucp\.so.*ucx_library") as caught:
        load_libucp("/nowhere/libucp.so")
    assert caught.value.fault is TransportFault.UNAVAILABLE
