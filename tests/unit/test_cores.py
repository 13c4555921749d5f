"""A process that gives way is weighed less by the kernel, alone and as a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GIVE_WAY = """
import os, sys
from pathlib import Path
from common.cores import give_way
give_way(int(sys.argv[1]))
group = Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), group.read_text().split()[-1] if group.exists() else sys.argv[1])
"""


@pytest.mark.parametrize("nice", [0, 3])
def test_a_process_gives_way_by_as_much_as_asked(nice: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    command = [sys.executable, "-c", GIVE_WAY, str(nice)]
    root = Path(__file__).resolve().parents[2]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, start_new_session=True)
    own, group = said.stdout.split()
    assert int(own) == min(19, before + nice)
    assert int(group) == nice
