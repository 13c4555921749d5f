"""The HTTP client and the OpenAI target against servers that misbehave in every way a network allows."""

import asyncio
import contextlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtest.client.http1 import (
    BadResponseError,
    BufferSink,
    ConnectFailedError,
    DisconnectedError,
    HttpClient,
    parse_url,
)
from loadtest.client.openai import OpenAITarget
from loadtest.client.target import GenerationOptions
from loadtest.record import Failure, RequestRecord, TargetError
from loadtest.streams import parse_stream
from tests.fakes.mock_openai_server import MockServer, Timings

ROOT = Path(__file__).resolve().parents[2]
FAST = Timings(ttft_s=0.001, itl_s=0.001)


class ScriptedServer:
    """Answers each request on each connection with the next script: pieces of bytes, or None for a hang-up."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.accepted = 0
        self.requests = []
        self.closed = asyncio.Event()
        self.open = {}

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.address = parse_url(f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}")
        return self

    async def __aexit__(self, *exc):
        self.server.close()
        for writer in self.open.values():
            writer.transport.abort()
        await asyncio.gather(*self.open)
        await self.server.wait_closed()

    async def serve(self, reader, writer):
        self.accepted += 1
        self.open[asyncio.current_task()] = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.scripts:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
                self.requests.append((head, await reader.readexactly(length)))
                if not await self.play(self.scripts.pop(0), writer):
                    break
            else:
                await reader.read()
        writer.close()
        self.closed.set()

    async def play(self, script, writer):
        """False where the script ends with a hang-up."""
        for piece in script:
            if piece is None:
                return False
            writer.write(piece)
            await writer.drain()
            # A piece must be read on its own: let the loop turn.
            await asyncio.sleep(0)
        return True


@contextlib.asynccontextmanager
async def client_of(server, **kwargs):
    client = HttpClient(server.address, **kwargs)
    try:
        yield client
    finally:
        client.close()


def chunked(body, sizes):
    """`body` as chunks of the given sizes, then of one for the rest."""
    out, at = b"", 0
    for size in [*sizes, len(body)]:
        piece = body[at : at + size]
        at += size
        if piece:
            out += b"%x\r\n%s\r\n" % (len(piece), piece)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + out + b"0\r\n\r\n"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=8), st.lists(st.integers(0, 600), max_size=10))
async def test_chunked_bodies_arrive_whole_however_they_are_cut(body, chunks, cuts):
    raw = chunked(body, chunks)
    edges = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    async with ScriptedServer(pieces) as server, client_of(server) as client:
        assert (await client.get("/", {}, 5)).body == body


async def test_a_connection_is_kept_and_used_again():
    ok = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]
    async with ScriptedServer(ok, ok, ok) as server, client_of(server) as client:
        for _ in range(3):
            assert (await client.get("/", {}, 5)).body == b"hi"
        assert server.accepted == 1


async def test_connection_close_is_obeyed_in_both_directions():
    closing = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"]
    async with ScriptedServer(closing, closing) as server, client_of(server) as client:
        await client.get("/", {}, 5)
        await client.get("/", {}, 5)
        assert server.accepted == 2
    ok = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]
    async with ScriptedServer(ok, ok) as server, client_of(server, keep_alive=False) as client:
        await client.get("/", {}, 5)
        await client.get("/", {}, 5)
        assert server.accepted == 2
        assert b"Connection: close" in server.requests[0][0]


async def test_a_body_without_a_length_ends_with_the_connection():
    async with (
        ScriptedServer([b"HTTP/1.1 200 OK\r\n\r\n", b"all ", b"of it", None]) as server,
        client_of(server) as client,
    ):
        assert (await client.get("/", {}, 5)).body == b"all of it"


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", None],
        [b"HTTP/1.1 200", None],
    ],
)
async def test_a_response_cut_short_is_a_disconnect(pieces):
    async with ScriptedServer(pieces) as server, client_of(server) as client:
        with pytest.raises(DisconnectedError):
            await client.get("/", {}, 5)
        assert len(server.requests) == 1


async def test_a_kept_connection_that_the_server_dropped_is_replaced_once():
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    async with ScriptedServer([ok], [None], [ok]) as server, client_of(server) as client:
        await client.get("/", {}, 5)
        assert (await client.get("/", {}, 5)).body == b"hi"
        assert server.accepted == 2


async def test_a_response_that_broke_off_is_never_sent_again():
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    broken = [ok[:-1], None]
    async with ScriptedServer([ok], broken, [ok]) as server, client_of(server) as client:
        await client.get("/", {}, 5)
        with pytest.raises(DisconnectedError):
            await client.get("/", {}, 5)
        assert len(server.requests) == 2


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"])
async def test_what_is_not_http_is_said_to_be_so(garbage):
    async with ScriptedServer([garbage]) as server, client_of(server) as client:
        with pytest.raises(BadResponseError):
            await client.get("/", {}, 5)


async def test_a_refused_connection_names_the_address():
    client = HttpClient(parse_url("http://127.0.0.1:1"))
    with pytest.raises(ConnectFailedError, match="Connection refused"):
        await client.get("/", {}, 5)


async def test_a_cancelled_request_closes_its_connection():
    async with (
        ScriptedServer([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nsh"]) as server,
        client_of(server) as client,
    ):
        with pytest.raises(TimeoutError):
            await client.get("/", {}, 0.05)
        async with asyncio.timeout(5):
            await server.closed.wait()


@pytest.mark.parametrize("url", ["https://h", "h:80", "http://", "http://h:x", "ftp://h"])
def test_urls_that_cannot_work_are_refused(url):
    with pytest.raises(TargetError):
        parse_url(url)


def test_the_url_may_have_a_path_and_port():
    address = parse_url("http://host:81/base/v1/")
    assert (address.host, address.port, address.path, address.host_header) == ("host", 81, "/base/v1", "host:81")


@contextlib.asynccontextmanager
async def mock_target(timings=FAST, api="completions", **options):
    server = MockServer(timings)
    await server.start()
    target = OpenAITarget(server.url, api, GenerationOptions(**options), api_key="sk-run")
    try:
        yield server, target
    finally:
        await target.close()
        await server.close()


def new_record(**kwargs):
    return RequestRecord(index=0, stream=0, turn=0, intended_s=0.0, requested_tokens=4, **kwargs)


async def generate(target, stream="name=a rate=1", prompt="one two three", keep=False):
    record = new_record(keep_answer=keep)
    await target.prepare(parse_stream(stream), prompt, 4, keep_answer=keep)(record)
    record.close(9e9)
    return record


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_stream_is_counted_by_event_and_by_usage(api):
    async with mock_target(Timings(0.001, 0.001, cached_tokens=2), api) as (server, target):
        info = await target.open()
        assert (info.model, info.max_model_len) == ("mock", 1 << 20)
        record = await generate(target)
    assert record.ok, record.failure_detail
    assert len(record.events_s) == 4
    assert (record.output_tokens, record.usage_prompt_tokens, record.usage_cached_tokens) == (4, 3, 2)
    assert record.finish_reason == "length"
    assert record.sent_s < record.events_s[0] <= record.events_s[-1] <= record.end_s < 9e9
    assert server.requests[0]["stream_options"] == {"include_usage": True}


async def test_events_that_carry_several_tokens_are_counted_right():
    async with mock_target(Timings(0.001, 0.001, tokens_per_event=3), token_ids=True) as (_, target):
        record = await generate(target, keep=True)
    assert len(record.events_s) == 2
    assert record.event_tokens == record.output_tokens == 4
    assert record.answer_ids == [0, 1, 2, 3]
    assert "".join(record.answer_text) == " tok tok tok tok"


@pytest.mark.parametrize(
    ("fault", "name", "tokens"),
    [
        ("http_429", "http_429", 0),
        ("http_503", "http_503", 0),
        ("error", "stream_error", 2),
        ("disconnect", "disconnect", 2),
        ("no_finish", "no_finish_reason", 2),
        ("not_json", "protocol", 2),
        ("empty", "empty_stream", 0),
    ],
)
async def test_every_way_to_fail_has_its_name(fault, name, tokens):
    async with mock_target(model="mock", extra_body=(("mock_fault", fault),)) as (_, target):
        record = await generate(target)
    assert record.failure_name == name
    assert len(record.events_s) == tokens
    assert record.failure_detail
    assert record.end_s == 9e9


async def test_an_absent_server_fails_each_request_by_name():
    target = OpenAITarget("http://127.0.0.1:1", "completions", GenerationOptions(model="m"))
    record = await generate(target)
    assert record.failure is Failure.CONNECT
    with pytest.raises(TargetError, match="is it started"):
        await target.open()


async def test_each_stream_sends_its_own_key_priority_and_salt():
    async with mock_target(model="mock", headers=[("X-Team", "a")], extra_body=(("min_p", 0.1),)) as (server, target):
        await generate(target, "name=a rate=1 key=sk-a priority=-2 salt=s1")
        await generate(target, "name=b rate=1 priority=high")
    first, second = server.requests
    assert (first["priority"], first["cache_salt"], first["min_p"]) == (-2, "s1", 0.1)
    assert second["priority"] == "high"
    assert "cache_salt" not in second
    assert server.headers[0]["authorization"] == "Bearer sk-a"
    assert "authorization" not in server.headers[1]
    assert server.headers[1]["x-team"] == "a"


async def test_a_sink_sees_the_last_response_only():
    sink = BufferSink()
    sink.on_head(500, {})
    sink.on_body(b"old", 0.0)
    sink.on_head(200, {})
    sink.on_body(b"new", 0.0)
    assert (sink.status, sink.body) == (200, b"new")


def test_importing_the_load_generator_loads_neither_torch_nor_the_services():
    code = (
        "import sys, loadtest.cli, loadtest.bench_client, common.model.tokenizer\n"
        "foreign = ('torch', 'router', 'prefill_service', 'decode_service', 'kv_transfer')\n"
        "print([m for m in foreign if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
