"""An OpenAI-compatible server that computes nothing: a first token at once, then one each GAP_S. For peers' routers.

python -m loadtest.router_cost.mock_openai PORT GAP_S
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

MODEL = "mock"


class MockServer(asyncio.Protocol):
    """HTTP/1.1 with keep-alive; a request's body in one piece of memory."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._buffer = b""
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in lines[1:] if b": " in line)
        length = int(fields.get(b"content-length", b"0"))
        if fields.get(b"transfer-encoding") == b"chunked":
            if not rest.endswith(b"0\r\n\r\n"):
                return
            rest = b"".join(part for part in rest.split(b"\r\n") if part.startswith(b"{"))
        elif len(rest) < length:
            return
        self._buffer = b""
        if lines[0].startswith(b"POST"):
            self._task = asyncio.get_running_loop().create_task(self._answer(json.loads(rest)))
        else:
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "mock"}
            body = json.dumps({"object": "list", "data": [model], "model_path": MODEL, "served_model_name": MODEL})
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body.encode())
            )

    async def _answer(self, body: dict[str, Any]) -> None:
        chat = "messages" in body
        total = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        due = loop.time()
        for index in range(total):
            if index:
                due += self._gap_s
                await asyncio.sleep(max(0.0, due - loop.time()))
            self._chunk(b"data: " + json.dumps(_event(chat, " token", index + 1 == total)).encode() + b"\n\n")
        self._chunk(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _event(chat: bool, text: str, last: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    choice |= {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": MODEL, "choices": [choice]}


async def main(port: int, gap_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: MockServer(gap_s), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
