"""An OpenAI-compatible server with known timings, for measuring and testing clients.

    python -m tests.fakes.mock_openai_server --ttft-ms 40 --itl-ms 10      prints its port, serves until stdin closes

Token k of a request is due at receipt + ttft + k·itl (absolute: no drift). With `slots`, only that many requests are
served at once and the others wait in line, so its capacity is known: slots / (ttft + (output − 1)·itl) requests a
second. A request may ask for a fault with the body field "mock_fault".
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import functools
import math
import sys
import time
from dataclasses import dataclass

import httptools
import orjson

from loadtest.timer import Alarms


@dataclass(frozen=True, slots=True)
class Timings:
    """tokens_per_event: tokens in one SSE event. stall_s: (start, end) after the first request, silent between."""

    ttft_s: float = 0.04
    itl_s: float = 0.01
    prefill_s_per_token: float = 0.0
    slots: int = 0
    tokens_per_event: int = 1
    stall_s: tuple[float, float] = (0.0, 0.0)
    cached_tokens: int = 0


class MockServer:
    """Owns its listening socket and connections; made inside the event loop."""

    def __init__(self, timings: Timings) -> None:
        self.timings = timings
        self.alarms = Alarms()
        self.running = 0
        self.waiting: collections.deque[_Connection] = collections.deque()
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[_Connection] = set()
        self.accepted = 0
        self.disconnects = 0
        # Receipt of the first generation request: what a stall is timed from.
        self.origin = math.inf
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def close(self) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        await self._server.wait_closed()
        self.alarms.close()

    def due(self, when: float) -> float:
        """`when`, put off to the end of the stall that it falls into."""
        start, end = (self.origin + s for s in self.timings.stall_s)
        return end if start <= when < end else when

    def admit(self, connection: _Connection) -> None:
        if self.timings.slots and self.running >= self.timings.slots:
            self.waiting.append(connection)
        else:
            self.running += 1
            connection.begin()

    def release(self) -> None:
        self.running -= 1
        while self.waiting:
            connection = self.waiting.popleft()
            if not connection.closed:
                self.running += 1
                connection.begin()
                return

    def metrics(self) -> bytes:
        return (
            b"# HELP baton_requests_running x\n# TYPE baton_requests_running gauge\n"
            b'baton_requests_running{role="router"} %d\nbaton_requests_waiting %d\nbaton_kv_cache_usage_ratio %.3f\n'
            % (self.running, len(self.waiting), min(1.0, self.running / (self.timings.slots or 64)))
        )


class _Connection(asyncio.Protocol):
    def __init__(self, server: MockServer) -> None:
        self.server = server
        self.closed = False
        self.active = False

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.server.connections.add(self)
        self.server.accepted += 1
        self.parser = httptools.HttpRequestParser(self)
        self.url, self.body, self.head = b"", [], {}

    def connection_lost(self, exc) -> None:
        self.closed = True
        self.server.connections.discard(self)
        if self.active:
            self.server.disconnects += 1
            self.end()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url, self.body, self.head = url, [], {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        if self.url == b"/v1/models":
            model = {"id": "mock", "object": "model", "max_model_len": 1 << 20}
            self.reply(200, orjson.dumps({"object": "list", "data": [model]}))
        elif self.url == b"/metrics":
            self.reply(200, self.server.metrics())
        elif self.url in (b"/v1/completions", b"/v1/chat/completions"):
            self.generate()
        else:
            self.reply(200 if self.url == b"/health" else 404, b"{}")

    def reply(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def generate(self) -> None:
        self.request = orjson.loads(b"".join(self.body))
        self.server.requests.append(self.request)
        self.server.headers.append(self.head)
        self.fault = self.request.get("mock_fault", "")
        if self.fault.startswith("http_"):
            error = {"error": {"message": "refused on request", "type": "x", "code": "x"}}
            self.reply(int(self.fault[5:]), orjson.dumps(error))
            return
        self.chat = self.url.endswith(b"chat/completions")
        if self.chat:
            self.num_prompt = sum(len(m["content"].split()) for m in self.request["messages"])
        else:
            prompt = self.request["prompt"]
            self.num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        self.num_output = self.request.get("max_tokens") or self.request.get("max_completion_tokens") or 16
        self.sent = 0
        self.active = True
        self.received = time.perf_counter()
        self.server.origin = min(self.server.origin, self.received)
        self.server.admit(self)

    def begin(self) -> None:
        timings = self.server.timings
        # A queued request starts when its slot is free.
        start = max(self.received, time.perf_counter()) if timings.slots else self.received
        self.first_due = start + timings.ttft_s + timings.prefill_s_per_token * self.num_prompt
        self.server.alarms.at(self.server.due(self.first_due), functools.partial(self.emit, self.request))

    def emit(self, request: dict) -> None:
        if self.closed or request is not self.request or not self.active:
            return
        timings = self.server.timings
        if not self.sent:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            if self.chat:
                self.event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            if self.fault == "empty":
                self.finish(None)
                return
        count = min(timings.tokens_per_event, self.num_output - self.sent)
        self.tokens(count)
        self.sent += count
        if self.fault and self.sent >= 2:
            self.misbehave()
        elif self.sent >= self.num_output:
            self.finish("length")
        else:
            due = self.first_due + self.sent * timings.itl_s
            self.server.alarms.at(self.server.due(due), functools.partial(self.emit, request))

    def tokens(self, count: int) -> None:
        text = " tok" * count
        choice: dict = {"delta": {"content": text}} if self.chat else {"text": text}
        if self.request.get("return_token_ids"):
            choice["token_ids"] = list(range(self.sent, self.sent + count))
        self.event(choice | {"finish_reason": None})

    def event(self, choice: dict) -> None:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        body = {"id": "cmpl-1", "object": kind, "created": 1, "model": "mock", "choices": [{"index": 0} | choice]}
        self.chunk(b"data: " + orjson.dumps(body) + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def misbehave(self) -> None:
        match self.fault:
            case "error":
                self.chunk(b'data: {"error": {"message": "worker lost", "type": "server_error"}}\n\n')
                self.finish(None)
            case "no_finish":
                self.finish(None)
            case "disconnect":
                self.transport.abort()
            case "not_json":
                self.chunk(b"data: {oops\n\n")
                self.finish(None)
            case "silence":
                return
            case other:
                raise ValueError(f"unknown mock_fault {other!r}")

    def finish(self, reason: str | None) -> None:
        if reason:
            self.event(({"delta": {}} if self.chat else {"text": ""}) | {"finish_reason": reason})
            if (self.request.get("stream_options") or {}).get("include_usage"):
                usage = {
                    "prompt_tokens": self.num_prompt,
                    "completion_tokens": self.sent,
                    "total_tokens": self.num_prompt + self.sent,
                    "prompt_tokens_details": {"cached_tokens": self.server.timings.cached_tokens},
                }
                body = {"id": "cmpl-1", "object": "x", "created": 1, "model": "mock", "choices": [], "usage": usage}
                self.chunk(b"data: " + orjson.dumps(body) + b"\n\n")
            self.chunk(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")
        self.end()

    def end(self) -> None:
        was_waiting = self in self.server.waiting
        self.active = False
        if not was_waiting:
            self.server.release()
        else:
            self.server.waiting.remove(self)


async def until(condition, timeout_s: float = 10.0) -> None:
    """Waits for what another part of the same event loop brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def serve(timings: Timings, port: int) -> None:
    server = MockServer(timings)
    await server.start(port)
    print(server.port, flush=True)
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: closed.set() if not sys.stdin.buffer.read1() else None)
    await closed.wait()
    await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=40.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--prefill-us-per-token", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--tokens-per-event", type=int, default=1)
    args = parser.parse_args()
    timings = Timings(
        ttft_s=args.ttft_ms / 1e3,
        itl_s=args.itl_ms / 1e3,
        prefill_s_per_token=args.prefill_us_per_token / 1e6,
        slots=args.slots,
        tokens_per_event=args.tokens_per_event,
    )
    import uvloop

    uvloop.run(serve(timings, args.port))


if __name__ == "__main__":
    main()
