"""What a client may do to the HTTP socket: nothing of it holds memory, a connection or another client's answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from router import http_protocol
from router.gateway import http_request
from tests.fakes.router_cluster import MockCluster, mock_cluster
from tests.fakes.tiny_folder import make_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


async def connect(cluster: MockCluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = cluster.router.http_url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All until the server ends the connection, in whichever way."""
    data = b""
    async with asyncio.timeout(20):
        try:
            while piece := await reader.read(1 << 16):
                data += piece
        except ConnectionError:
            pass
    return data


def post(body: bytes, *, length: int | None = None, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A"])
async def test_a_connection_without_a_whole_head_is_ended(folder, monkeypatch, sent):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    async with mock_cluster(folder) as cluster:
        reader, writer = await connect(cluster)
        writer.write(sent)
        assert await rest(reader) == b""
        writer.close()


async def test_a_kept_alive_connection_must_send_its_next_head_in_time(folder, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with mock_cluster(folder) as cluster:
        reader, writer = await connect(cluster)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"GET /heal")
        assert await rest(reader) == b""
        writer.close()


async def test_a_head_is_bounded(folder):
    async with mock_cluster(folder) as cluster:
        reader, writer = await connect(cluster)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Endless: ")

        async def pour() -> None:
            try:
                while True:
                    writer.write(b"a" * (1 << 16))
                    await writer.drain()
            except ConnectionError:
                pass

        pouring = asyncio.create_task(pour())
        answer = await rest(reader)
        await pouring
        assert answer == b"" or b"head is larger than" in answer  # a reset may overtake the answer
        writer.close()


async def test_a_body_that_does_not_arrive_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(http_request, "BODY_TIMEOUT_S", 0.05)
    async with mock_cluster(folder) as cluster:
        reader, writer = await connect(cluster)
        writer.write(post(b'{"prompt":', length=100))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        assert b" 504 " in answer
        assert b"did not arrive within" in answer
        writer.close()


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(folder):
    async with mock_cluster(folder) as cluster:
        reader, writer = await connect(cluster)
        writer.write(post(b"{", length=http_request.MAX_BODY_BYTES + 1))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        assert b" 400 " in answer
        assert b"larger than" in answer
        writer.close()


async def test_a_client_that_leaves_with_requests_in_its_pipeline_aborts_the_running_one(folder):
    async with mock_cluster(folder, step_s=0.01) as cluster:
        reader, writer = await connect(cluster)
        body = json.dumps({"prompt": "hello", "max_tokens": 40, "stream": True}).encode()
        writer.write(post(body) * 3)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the abort", timeout_s=5)
        page = (await cluster.http.get("/metrics")).text
        assert 'baton_requests_total{outcome="abort"} 1.0' in page


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_only_stops_sending_gets_its_whole_answer(folder, stream):
    async with mock_cluster(folder, step_s=0.01) as cluster:
        reader, writer = await connect(cluster)
        writer.write(post(json.dumps({"prompt": "hello", "max_tokens": 20, "stream": stream}).encode()))
        writer.write_eof()
        answer = await rest(reader)
        assert b"HTTP/1.1 200 OK" in answer
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}}")
        writer.close()
        cluster.assert_nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_is_gone_is_told_from_one_that_stopped_sending(folder, stream):
    async with mock_cluster(folder) as cluster:
        cluster.prefills[0].first_tokens.close()
        _reader, writer = await connect(cluster)
        writer.write(post(json.dumps({"prompt": "hello", "max_tokens": 20, "stream": stream}).encode()))
        await cluster.prefills[0].until(lambda: cluster.prefills[0].live)
        writer.close()
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the abort", timeout_s=5)


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"prompt":' + b"[[1]," * 100_000, b"{" * 50_000])
async def test_a_body_of_very_many_lists_is_refused_unparsed(folder, body):
    async with mock_cluster(folder) as cluster:
        response = await cluster.http.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert "lists and objects" in response.json()["error"]["message"] or "larger than" in response.text


async def test_brackets_in_a_text_are_text(folder):
    async with mock_cluster(folder, settings={"max_model_len": 512}) as cluster:
        text = "[" * 21_000
        response = await cluster.http.post("/v1/completions", json={"prompt": text})
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_reader_that_pauses_finds_every_token_once_and_in_order(folder):
    async with mock_cluster(folder) as cluster:
        body = {"prompt": "hello", "max_tokens": 400, "stream": True, "stop": []}
        whole = await cluster.complete(prompt="hello", max_tokens=400)
        reader, writer = await connect(cluster)
        transport = writer.transport
        writer.write(post(json.dumps(body).encode()))
        received = await reader.readuntil(b"data: ")
        for _ in range(20):
            transport.pause_reading()
            await cluster.router.fleet.wait_changed(0.005)
            transport.resume_reading()
            received += await reader.read(2048)
            if b"[DONE]" in received:
                break
        if b"[DONE]" not in received:
            received += await reader.readuntil(b"[DONE]")
        lines = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        assert text == whole["choices"][0]["text"]
        writer.close()
