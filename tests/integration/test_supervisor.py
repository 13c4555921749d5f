"""The supervisor with small stand-in children: restarts, giving up, bounded stops, no orphan."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common.config import resolve_settings
from common.embedded_redis import answers_ping
from common.errors import StartupError
from common.registry import worker_key
from deploy.cluster_plan import plan_parts
from deploy.local_cluster import EmbeddedRedisPart, LocalCluster, child_environment, is_ready, part_command
from deploy.preflight import check_port, choose_grpc_port
from deploy.restart_policy import RestartPolicy
from deploy.supervisor import Child, ChildSpec, ChildState, GaveUpError
from deploy.watchdog import Watchdog
from tests.processes import all_gone, becomes_true, gone

SLEEPS = "import time; time.sleep(600)"
IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
FORKS = "import os, time; os.fork(); print('up', flush=True); time.sleep(600)"
POLICY = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, max_fast_deaths=2)
DEADLINE_S = 20.0

SERVES_READY = """
import http.server, sys, tomllib
settings = tomllib.load(open(sys.argv[1], "rb"))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404); self.end_headers()
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", settings["port"]), Ready).serve_forever()
"""
REGISTERS = """
import sys, time, tomllib, redis
settings = tomllib.load(open(sys.argv[1], "rb"))
print('{"event": "loading weights"}', flush=True)
redis.Redis.from_url(settings["redis_url"]).set(sys.argv[2], "x")
time.sleep(600)
"""
SUPERVISES = """
import asyncio, sys
from pathlib import Path
from deploy.local_cluster import child_environment
from deploy.restart_policy import RestartPolicy
from deploy.supervisor import Child, ChildSpec
async def main():
    child = Child(ChildSpec("c", [sys.executable, "-c", sys.argv[1]], Path(sys.argv[2])), RestartPolicy(), print)
    child.start(child_environment())
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def until(condition: Callable[[], object]) -> None:
    assert await asyncio.to_thread(becomes_true, condition)


class Supervised:
    """A child that runs `code`, and what its supervisor said."""

    def __init__(self, tmp_path: Path, code: str, policy: RestartPolicy = POLICY) -> None:
        self.given_up: asyncio.Future[GaveUpError] = asyncio.get_running_loop().create_future()
        self.log = tmp_path / "child.log"
        self.child = Child(
            ChildSpec("worker-0", [sys.executable, "-c", code], self.log), policy, self.given_up.set_result
        )
        self.child.start(child_environment())

    async def wrote(self, text: str) -> None:
        await until(lambda: text in self.log.read_text())


async def test_a_child_that_dies_is_started_again(tmp_path):
    supervised = Supervised(tmp_path, SLEEPS)
    first = supervised.child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervised.child.pid not in (first, None))
    assert supervised.child.state is ChildState.RUNNING
    second = supervised.child.pid
    await supervised.child.stop(5)
    assert gone(second)
    assert supervised.child.state is ChildState.ENDED


PATS = """
import time
from common.sd_notify import notify
while True:
    notify("WATCHDOG=1")
    print("up", flush=True)
    time.sleep(0.1)
"""


async def test_a_child_that_stops_moving_is_killed_and_started_again(tmp_path):
    supervised = Supervised(tmp_path, PATS, RestartPolicy(first_delay_s=0.01, watchdog_s=2.0))
    await supervised.wrote("up")
    first = supervised.child.pid
    os.kill(first, signal.SIGSTOP)
    await until(lambda: supervised.child.pid not in (first, None))
    assert gone(first)
    await supervised.child.stop(5)


async def test_a_child_that_never_pats_the_watchdog_is_left_alone(tmp_path):
    silences = []
    dog = Watchdog(0.01, lambda: silences.append(1))
    dog._on_look()
    sent = {**os.environ, **dog.environment}
    code = "from common.sd_notify import notify; notify('WATCHDOG=1')"
    dog._on_look()
    assert not silences
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], env=sent, check=True, timeout=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while not silences:  # noqa: ASYNC110 (its timer looks by itself)
            await asyncio.sleep(0.02)
    dog.close()


async def test_a_restart_that_the_machine_refuses_is_tried_again(tmp_path, monkeypatch):
    """A failed fork must not leave the part dead for good, and nobody told."""
    supervised = Supervised(tmp_path, SLEEPS)
    refusals = iter([OSError("no memory")] * 2)
    popen = subprocess.Popen

    def short_of_memory(*args, **options):
        for refusal in refusals:
            raise refusal
        return popen(*args, **options)

    monkeypatch.setattr("deploy.supervisor.subprocess.Popen", short_of_memory)
    first = supervised.child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervised.child.pid not in (first, None))
    assert supervised.child.state is ChildState.RUNNING
    await supervised.child.stop(5)


async def test_a_run_directory_that_takes_no_files_is_told_in_one_line(tmp_path):
    parts = plan_parts(
        resolve_settings({}, environ={}).settings, redis_url="u", model="/m", port=1, grpc_port=2, num_cores=1
    )
    cluster = LocalCluster(parts, tmp_path / "gone", POLICY, print, stand_in_command)
    with pytest.raises(StartupError, match=r"can't write .*router\.toml: No such file or directory; make room"):
        cluster.start()
    await cluster.stop(0.5)


async def test_one_that_keeps_dying_is_given_up_with_its_last_lines(tmp_path):
    supervised = Supervised(tmp_path, "print('what went wrong'); raise SystemExit(7)")
    async with asyncio.timeout(DEADLINE_S):
        error = await supervised.given_up
    assert str(error) == f"worker-0 died 3 times in a row, the last time with exit code 7: see {supervised.log}"
    assert error.exit_code == 1
    assert list(error.log_tail) == ["what went wrong"] * 3
    await supervised.child.stop(1)


async def test_one_that_says_why_it_can_not_start_is_not_tried_again(tmp_path):
    code = "import sys; print('noise'); print('baton: tensor x is missing', file=sys.stderr); sys.exit(2)"
    supervised = Supervised(tmp_path, code)
    async with asyncio.timeout(DEADLINE_S):
        error = await supervised.given_up
    assert (str(error), error.exit_code, list(error.log_tail)) == ("worker-0: tensor x is missing", 2, [])


async def test_a_stop_while_it_waits_for_a_restart_starts_nothing(tmp_path):
    supervised = Supervised(tmp_path, "raise SystemExit(1)", RestartPolicy(first_delay_s=600.0, longest_delay_s=600.0))
    await until(lambda: supervised.child.state is ChildState.WAITING)
    async with asyncio.timeout(DEADLINE_S):
        await supervised.child.stop(0)
    assert (supervised.child.state, supervised.child.pid) == (ChildState.ENDED, None)


async def test_one_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    supervised = Supervised(tmp_path, IGNORES_TERM)
    await supervised.wrote("up")
    pid = supervised.child.pid
    await supervised.child.stop(0.05)
    assert gone(pid)
    await supervised.child.stop(0.05)


async def test_a_grandchild_goes_with_the_child(tmp_path):
    supervised = Supervised(tmp_path, FORKS)
    await supervised.wrote("up\nup")
    pids = [supervised.child.pid, *(p.pid for p in psutil.Process(supervised.child.pid).children(recursive=True))]
    assert len(pids) == 2
    await supervised.child.stop(5)
    assert all_gone(pids)


def test_killing_the_supervisor_kills_the_child(tmp_path):
    words = [sys.executable, "-c", SUPERVISES, IGNORES_TERM, str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        os.kill(supervisor.pid, signal.SIGKILL)
        assert gone(pid)


def stand_in_command(part, config):
    if part.role == "router":
        return [sys.executable, "-c", SERVES_READY, str(config)]
    return [sys.executable, "-c", REGISTERS, str(config), worker_key("default", part.worker_id)]


async def test_a_cluster_is_ready_when_every_part_is_and_stops_without_an_orphan(tmp_path):
    given_up: list[GaveUpError] = []
    redis = EmbeddedRedisPart(tmp_path, POLICY, given_up.append)
    await redis.start()
    settings = resolve_settings({"prefill": 2, "decode": 1}, environ={}).settings
    port = check_port("127.0.0.1", 0, "--port")
    parts = plan_parts(settings, redis_url=redis.url, model="/m", port=port, grpc_port=1, num_cores=2)
    cluster = LocalCluster(parts, tmp_path, POLICY, given_up.append, stand_in_command)
    said: list[tuple[str, str, bool]] = []
    cluster.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await cluster.ready(lambda *words: said.append(words))
        assert {part for part, _, done in said if done} == {"router", "prefill-0", "prefill-1", "decode-0"}
        assert is_ready("127.0.0.1", port)
        pids = [child.pid for child in [*cluster.children.values(), redis.child]]
    finally:
        await cluster.stop(0.5)
        await redis.stop()
    assert all_gone(pids)
    assert not given_up
    assert (tmp_path / "prefill-0.toml").stat().st_mode & 0o077 == 0


async def test_a_redis_that_dies_comes_back_on_the_same_socket(tmp_path):
    redis = EmbeddedRedisPart(tmp_path, POLICY, print)
    await redis.start()
    first = redis.child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: redis.child.pid not in (first, None))
    await until(lambda: answers_ping(tmp_path / "redis.sock"))
    await redis.stop()
    assert not answers_ping(tmp_path / "redis.sock")


def test_a_part_is_run_by_this_interpreter_with_nothing_from_our_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_PORT", "1")
    assert "BATON_PORT" not in child_environment()
    part = plan_parts(
        resolve_settings({}, environ={}).settings, redis_url="r", model="m", port=1, grpc_port=2, num_cores=1
    )[0]
    command = part_command(part, tmp_path / "c.toml")
    assert command[0] == sys.executable
    assert command[-3:] == ["router", "--config", str(tmp_path / "c.toml")]


def test_a_port_in_use_is_told_with_its_owner_and_the_option_to_change():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(StartupError) as error:
            check_port("127.0.0.1", port, "--port")
        assert choose_grpc_port("127.0.0.1", 0, port - 1) != port
    assert f"port {port} on 127.0.0.1 is in use by " in str(error.value)
    assert f"(pid {os.getpid()})" in str(error.value)
    assert "choose another with --port" in str(error.value)
    assert check_port("127.0.0.1", port, "--port") == port


def test_the_command_starts_without_torch():
    """`baton version`, `check-config` and each --help stay quick."""
    code = "import sys, deploy.cli, deploy.serve, deploy.role; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
