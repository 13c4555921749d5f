"""The health check's exit status tells a part that is well from one that is not, over HTTP and gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deploy.healthcheck import UNWELL, USAGE, WELL, main


@pytest.fixture
def http_url() -> Iterator[str]:
    """Answers 503 to /unready and 200 to all else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if self.path == "/unready" else 200)
            self.end_headers()
            self.wfile.write(b"no connected worker for: decode" if self.path == "/unready" else b"ok")

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def grpc_server() -> Iterator[tuple[str, health.HealthServicer]]:
    server, servicer = grpc.server(ThreadPoolExecutor(1)), health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}", servicer
    server.stop(0).wait()


def test_http_is_well_with_200_only(http_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{http_url}/ready"]) == WELL
    assert main([f"{http_url}/unready"]) == UNWELL
    assert "503: no connected worker for: decode" in capsys.readouterr().out


def test_grpc_is_well_while_serving_only(
    grpc_server: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    url, servicer = grpc_server
    statuses = health_pb2.HealthCheckResponse
    servicer.set("", statuses.SERVING)
    assert main([url]) == WELL
    servicer.set("", statuses.NOT_SERVING)
    assert main([url]) == UNWELL
    assert "NOT_SERVING" in capsys.readouterr().out


def test_a_proxy_of_the_environment_is_passed_by(
    http_url: str, grpc_server: tuple[str, health.HealthServicer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    grpc_server[1].set("", health_pb2.HealthCheckResponse.SERVING)
    assert main([f"{http_url}/ready"]) == WELL
    assert main([grpc_server[0]]) == WELL


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_who_does_not_answer_is_unwell(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{scheme}://127.0.0.1:9"]) == UNWELL
    assert "refused" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("arguments", [[], ["redis://127.0.0.1:6379"], ["http://a/", "http://b/"]])
def test_anything_else_is_a_wrong_use(arguments: list[str]) -> None:
    assert main(arguments) == USAGE
