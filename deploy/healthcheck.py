"""Asks one part of a cluster how it is, for container health checks: `python -m deploy.healthcheck URL`.

    http://127.0.0.1:8000/ready   well: status 200
    grpc://127.0.0.1:7000         well: grpc.health.v1 says SERVING of the whole server

The exit status is 0 for well, 1 for not, 2 for a URL that it can't read; one line says why.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

TIMEOUT_S: Final = 4.0
WELL, UNWELL, USAGE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Exit status. arguments: those after the program's name."""
    if len(arguments) != 1 or (check := _CHECKS.get(urlsplit(arguments[0]).scheme)) is None:
        sys.stderr.write("usage: python -m deploy.healthcheck http://HOST:PORT/PATH | grpc://HOST:PORT\n")
        return USAGE
    url = arguments[0]
    problem = check(url)
    sys.stdout.write(f"{url}: {problem or 'well'}\n")
    return UNWELL if problem else WELL


def check_http(url: str) -> str:
    """Why `url` does not answer with 200; "" if it does. Proxies of the environment are passed by."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            return "" if response.status == 200 else f"status {response.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}: {error.read(300).decode(errors='replace')}"
    except OSError as error:
        return str(getattr(error, "reason", error))


def check_grpc(url: str) -> str:
    """Why the server at `url` is not SERVING; "" if it is."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(urlsplit(url).netloc, options=options) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    status = health_pb2.HealthCheckResponse.ServingStatus
    return "" if answer.status == status.SERVING else status.Name(answer.status)


_CHECKS: Final = {"http": check_http, "grpc": check_grpc}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
