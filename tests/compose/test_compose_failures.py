"""What dies in a cluster of containers is missed by nobody, and comes back."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.compose.cluster import DECODE, MODEL, ROUTERS, ComposeCluster, poll_until

CLIENTS = 6
STOP_WITHIN_S = 25.0
KILL_BATON = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    if pid not in ("1", str(os.getpid())) and b"/bin/baton" in open(f"/proc/{pid}/cmdline", "rb").read():
        os.kill(int(pid), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Answer:
    prompt: int
    text: str
    finish_reason: str
    ended_at: float


class Load:
    """Clients that stream one greedy answer after the other, through both routers, until told to stop. An error in a
    stream, or one without a finish reason, is raised by `stop`."""

    def __init__(self, cluster: ComposeCluster) -> None:
        self.answers: list[Answer] = []
        self._cluster = cluster
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._futures = [self._pool.submit(self._run, number) for number in range(CLIENTS)]

    def answered_since(self, moment: float) -> int:
        self._raise_failures()
        return sum(answer.ended_at > moment for answer in list(self.answers))

    def stop(self) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._raise_failures()

    def _raise_failures(self) -> None:
        for future in self._futures:
            if future.done():
                future.result()

    def _run(self, number: int) -> None:
        with self._cluster.client(ROUTERS[number % len(ROUTERS)]) as client:
            while not self._stop.is_set():
                text, reason = ask(client, number)
                self.answers.append(Answer(number, text, reason, time.monotonic()))


def ask(client, number: int) -> tuple[str, str]:
    messages = [{"role": "user", "content": f"Count upwards, one number a line, beginning with {number * 100}."}]
    text, reason = "", ""
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=96, temperature=0, stream=True
    ):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert reason in ("stop", "length"), f"prompt {number}: a stream ended without a finish reason after {text!r}"
    return text, reason


def test_clients_do_not_notice_that_a_decode_container_is_killed(cluster: ComposeCluster) -> None:
    load = Load(cluster)
    try:
        poll_until(lambda: cluster.running_on("decode-1") > 0, "requests to run on decode-1")
        killed_at = time.monotonic()
        cluster.run_engine("kill", cluster.container("decode-1"))
        poll_until(lambda: cluster.workers("router-1")["decode"] == 1, "router-1 to miss decode-1", 15.0)
        poll_until(lambda: load.answered_since(killed_at) >= 3 * CLIENTS, "decode-2 to answer alone")
    finally:
        load.stop()
        cluster.run_engine("start", cluster.container("decode-1"))
    print(f"\n{len(load.answers)} answers, {load.answered_since(killed_at)} after the kill, no error")


def test_a_part_that_crashes_is_started_again(cluster: ComposeCluster) -> None:
    container = cluster.container("prefill-1")
    started = cluster.state("prefill-1")["StartedAt"]
    cluster.run_engine("exec", container, "python", "-c", KILL_BATON)
    poll_until(lambda: cluster.state("prefill-1")["StartedAt"] != started, "the engine to start prefill-1 again")
    poll_until(cluster.all_connected, "prefill-1 to be back")


def test_parts_wait_for_a_redis_that_comes_late(cluster: ComposeCluster) -> None:
    """With Redis gone, its name is not even known."""
    late = {"router-2": "router is listening", "prefill-2": "ready", "decode-2": "ready"}
    times_up = {service: len(cluster.events(service, event)) for service, event in late.items()}
    redis = cluster.container("redis")
    cluster.run_engine("stop", redis)
    try:
        for service in late:
            cluster.run_engine("restart", cluster.container(service))
        for service, event in late.items():
            poll_until(lambda s=service, e=event: len(cluster.events(s, e)) > times_up[s], f"{service} to be up")
        with cluster.client("router-1") as client:
            assert ask(client, 7)[0]
    finally:
        cluster.run_engine("start", redis)
    poll_until(cluster.all_connected, "all to register with Redis")
    with cluster.client("router-2") as client:
        assert ask(client, 8)[0]


@pytest.mark.parametrize("service", ["router-2", DECODE[1]])
def test_a_part_stops_cleanly_when_told_to(cluster: ComposeCluster, service: str) -> None:
    """Exit status 0: the signal reached the part, and it had the time that it takes."""
    container = cluster.container(service)
    cluster.run_engine("stop", "-t", f"{STOP_WITHIN_S:.0f}", container)
    try:
        assert cluster.state(service)["ExitCode"] == 0
    finally:
        cluster.run_engine("start", container)


def test_a_containers_first_process_hears_sigterm_while_it_loads(cluster: ComposeCluster) -> None:
    """Without an init process in front of it, as in a Kubernetes pod."""
    mount = f"{cluster.models}:/var/cache/baton/models:ro"
    command = ("decode", "--redis-url", "redis://127.0.0.1:1", "--set", "log_format=json")
    container = cluster.run_engine("run", "-d", "-v", mount, "localhost/baton:test", *command).stdout.strip()
    try:
        poll_until(lambda: "loading libraries" in cluster.run_engine("logs", container).stderr, "the start", 20.0)
        cluster.run_engine("stop", "-t", f"{STOP_WITHIN_S:.0f}", container)
        code = cluster.run_engine("inspect", "--format", "{{.State.ExitCode}}", container).stdout.strip()
        assert code == str(128 + signal.SIGTERM)
    finally:
        cluster.run_engine("rm", "-f", container)
