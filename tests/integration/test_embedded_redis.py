"""The embedded Redis: real, private, on a socket alone, and gone with its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from common.embedded_redis import EmbeddedRedis, answers_ping, redis_socket_path
from common.errors import StartupError
from deploy.preflight import check_redis
from tests.processes import gone

OWNER = """
import sys
from common.embedded_redis import EmbeddedRedis
server = EmbeddedRedis()
server.start()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


def test_it_serves_on_a_socket_and_no_port():
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert not psutil.Process(server.pid).net_connections("inet")


def test_stopping_twice_leaves_no_process_and_no_file():
    server = EmbeddedRedis()
    server.start()
    pid, path = server.pid, Path(server.url.removeprefix("unix://"))
    assert path.stat().st_mode & 0o077 == 0
    server.stop()
    server.stop()
    assert gone(pid)
    assert not path.parent.exists()


def test_a_given_directory_stays_and_holds_the_log(tmp_path):
    with EmbeddedRedis(tmp_path) as server:
        assert server.url == f"unix://{tmp_path}/redis.sock"
    assert (tmp_path / "redis.log").exists()


def test_a_path_too_long_for_a_socket_is_gone_around(tmp_path):
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True)
    with EmbeddedRedis(deep) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert len(server.url) < 110


def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path):
    (tmp_path / "redis.sock").mkdir()  # can't be bound
    with pytest.raises(StartupError, match=r"the embedded Redis does not start: .*socket"):
        EmbeddedRedis(tmp_path).start()


def test_a_socket_without_a_server_does_not_answer(tmp_path):
    path = tmp_path / "s"
    assert not answers_ping(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        assert not answers_ping(path, timeout_s=0.05)


def test_it_dies_with_an_owner_that_is_killed():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        os.kill(owner.pid, signal.SIGKILL)
        assert gone(int(pid))
    folder = Path(url.removeprefix("unix://")).parent
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_a_directory_made_for_the_socket_is_private():
    with contextlib.ExitStack() as stack:
        path = redis_socket_path(None, stack)
        assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://host", "redis_url is not understood"),
        ("redis://127.0.0.1:abc", "redis_url is not understood"),
        ("redis://:hunter2@127.0.0.1:1", r"no Redis at 127\.0\.0\.1:1: "),
        ("unix:///no/such.sock", r"no Redis at /no/such\.sock: "),
    ],
)
def test_a_redis_that_does_not_answer_is_told_before_anything_starts(url, told):
    with pytest.raises(StartupError, match=told) as error:
        check_redis(url)
    assert "\n" not in str(error.value)
    assert "hunter2" not in str(error.value)


def test_a_redis_that_answers_passes():
    with EmbeddedRedis() as server:
        check_redis(server.url)
