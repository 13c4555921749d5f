"""Hosts of our own: network namespaces joined by a cable that delays, loses, and can be cut.

    near  10.87.0.1/24 baton0 ══ Cable ══ baton0 10.87.0.2/24  far      far also has 192.0.2.1 on an interface that
                                                                         leads nowhere: what must not be chosen

The cable is a thread that carries packets between two tun devices: netem's part, on kernels that lack it too.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

NEAR, FAR, NOWHERE = "10.87.0.1", "10.87.0.2", "192.0.2.1"
DEVICE = "baton0"
_MTU = 9000
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_SLAVE, _MS_REC = 1 << 19, 1 << 14
_MNT_DETACH = 2
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class Cable:
    """Between two tun devices. delay_s: one way; loss: part of the packets, chosen by a seed of its own."""

    def __init__(self, near: int, far: int) -> None:
        self._other = {near: far, far: near}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._chance = random.Random(5)
        self._stopping = threading.Event()
        self.delay_s = self.loss = 0.0
        self.is_cut = False
        self.num_carried = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Once both devices are up."""
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        for descriptor in self._other:
            os.close(descriptor)

    def _run(self) -> None:
        while not self._stopping.is_set():
            now = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now:
                _, _, to, packet = heapq.heappop(self._under_way)
                if not self.is_cut:
                    os.write(to, packet)
            wait_s = self._under_way[0][0] - now if self._under_way else 0.05
            for descriptor in select.select(list(self._other), [], [], max(0.0, min(wait_s, 0.05)))[0]:
                packet = os.read(descriptor, _MTU + 100)
                self.num_carried += 1
                if not self.is_cut and self._chance.random() >= self.loss:
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(self._under_way, (due, self.num_carried, self._other[descriptor], packet))


@dataclass(frozen=True)
class Hosts:
    """near, far: names of namespaces."""

    near: str
    far: str
    cable: Cable


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where namespaces or tun devices can't be had."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("/dev/net/tun can't be opened: no cable between namespaces")
    tag = secrets.token_hex(3)
    near, far = f"baton-near-{tag}", f"baton-far-{tag}"
    made = subprocess.run(["ip", "netns", "add", near], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        _ip("netns", "add", far)
        _ip("-n", far, "link", "add", "aaa", "type", "veth", "peer", "name", "nobody")
        _ip("-n", far, "addr", "add", f"{NOWHERE}/24", "dev", "aaa")
        _ip("-n", far, "link", "set", "aaa", "up")
        _ip("-n", far, "link", "set", "nobody", "up")
        cable = Cable(_open_tun(near), _open_tun(far))
        try:
            for host, address in ((near, NEAR), (far, FAR)):
                _ip("-n", host, "addr", "add", f"{address}/24", "dev", DEVICE)
                _ip("-n", host, "link", "set", DEVICE, "mtu", str(_MTU), "up")
                _ip("-n", host, "link", "set", "lo", "up")
            cable.start()
            yield Hosts(near, far, cable)
        finally:
            cable.close()
    finally:
        for host in (near, far):
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def enter(host: str) -> None:
    """Move this process there, with a /sys that shows its interfaces, as `ip netns exec` does: before it has any thread
    but the calling one. "": stay."""
    if not host:
        return
    visit(host)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "a mount namespace")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "private mounts")
    libc.umount2(b"/sys", _MNT_DETACH)
    _check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "its own /sys")


def _open_tun(host: str) -> int:
    """A namespace is a thread's: one that visits `host` opens the device there."""
    opened: list[int] = []

    def open_there() -> None:
        visit(host)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        opened.append(descriptor)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    return opened[0]


def visit(host: str) -> None:
    """Let this thread's sockets be opened there, from now on."""
    descriptor = os.open(f"/var/run/netns/{host}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET), f"a place in {host}")
    finally:
        os.close(descriptor)


def _check(status: int, what: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"can't have {what}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
