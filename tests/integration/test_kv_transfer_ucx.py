"""What only UCX has: lanes to choose from, devices to name."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from kv_transfer.transport.base import TransportError, TransportFault
from kv_transfer.transport.lanes import LaneKind
from kv_transfer.transport.shared_memory import SharedMemory
from kv_transfer.transport.start import start_transport
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_worker import UcxSettings
from tests.kv_fakes import WAIT_S


def lost_is_a_surprise(error: TransportError) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["any lane", "tcp"])
def test_the_lanes_chosen_are_named_and_are_among_the_devices(tls: str) -> None:
    receiver, sender = (UcxTransport(UcxSettings(net_devices="lo", tls=tls)) for _ in range(2))
    receiver.start()
    sender.start()
    ring = receiver.allocate(4096)
    lanes = sender.connect(ring.descriptor(), lost_is_a_surprise).result(WAIT_S).lanes
    devices = sender.devices
    sender.close()
    receiver.close()
    assert "tcp/lo" in lanes
    # A transport in the same process may also be reached by other memory lanes.
    assert (len(lanes) == 1) == (tls == "tcp")
    assert set(lanes) <= set(devices)


def test_a_device_that_is_not_there_is_named() -> None:
    transport = UcxTransport(UcxSettings(net_devices="nosuch0", tls="tcp"))
    with pytest.raises(TransportError, match=r"nosuch0.*ucx_net_devices") as caught:
        transport.start()
    assert caught.value.fault is TransportFault.UNAVAILABLE
    transport.close()


def test_without_a_lane_of_the_required_kind_it_does_not_start_and_names_wanted_and_got() -> None:
    transport = UcxTransport(UcxSettings(net_devices="lo", tls="tcp"))
    with pytest.raises(TransportError, match=r"require_transport is rdma, what is there is tcp/lo"):
        start_transport(transport, LaneKind.RDMA)
    with pytest.raises(TransportError, match="closed"):
        transport.allocate(4096)
    again = UcxTransport(UcxSettings(net_devices="lo", tls="tcp"))
    start_transport(again, LaneKind.TCP)
    again.close()


def test_memory_that_nothing_was_gathered_into_takes_no_pages() -> None:
    size = 256 << 20
    transport = UcxTransport(UcxSettings(net_devices="lo"))
    transport.start()
    before = psutil.Process(os.getpid()).memory_info().rss
    ring = SharedMemory(size)
    regions = [transport.allocate(size), transport.allocate(size, ring.view)]
    assert psutil.Process(os.getpid()).memory_info().rss - before < size // 4
    assert all(not region.view[:: size // 8].any() for region in regions)
    transport.close()
    ring.close()


_COMPARE_BEFORE_AND_AFTER = """
import ctypes
from kv_transfer.transport.ucx import UcxTransport
from kv_transfer.transport.ucx_worker import UcxSettings

def code():
    libc = ctypes.CDLL(None)
    names = ("mmap", "munmap", "mremap", "brk", "sbrk", "madvise", "malloc", "free")
    return {name: ctypes.string_at(ctypes.cast(getattr(libc, name), ctypes.c_void_p), 16) for name in names}

before = code()
transport = UcxTransport(UcxSettings(net_devices="lo"))
transport.start()
transport.allocate(4096)
changed = [name for name, start in code().items() if start != before[name]]
transport.close()
if changed:
    raise SystemExit(f"UCX rewrote {changed}")
"""


def test_ucx_leaves_the_memory_calls_of_the_process_as_they_are() -> None:
    """Others' threads may be in the middle of them. In a process of its own: what is patched stays so."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [sys.executable, "-c", _COMPARE_BEFORE_AND_AFTER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr[-500:]
