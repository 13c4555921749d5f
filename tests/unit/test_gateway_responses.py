"""Writing to a client that is slow, or gone, or whose request fails: seen from the ASGI interface."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import orjson
import pytest

from router.gateway.formats import ChatFormat, CompletionFormat, Envelope
from router.gateway.group import GenerationGroup
from router.gateway.responses import EventStream, WholeAnswer
from router.metrics import RouterMetrics
from tests.fakes.router_parts import Bench, make_spec, settle
from tests.unit.test_gateway_text_stream import ByteDetokenizer


class Connection:
    """An ASGI client. While `blocked`, it takes no bytes."""

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.unblocked = asyncio.Event()
        self.unblocked.set()
        self.gone = asyncio.Event()

    async def send(self, message) -> None:
        await self.unblocked.wait()
        self.messages.append(message)

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def writes(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def events(self) -> list:
        lines = [x for x in b"".join(self.writes).split(b"\n\n") if x]
        return [x[6:].decode() if x == b"data: [DONE]" else orjson.loads(x[6:]) for x in lines]


class Serving:
    """One response over played workers. Token ids are bytes of text."""

    def __init__(self, *, stream: bool = True, chat: bool = False, max_tokens: int = 200, prompts: int = 1) -> None:
        self.bench = Bench()
        self.connection = Connection()
        model = SimpleNamespace(new_detokenizer=ByteDetokenizer)
        state = SimpleNamespace(
            model=model, dispatcher=self.bench.dispatcher, metrics=RouterMetrics(), clock=time.monotonic
        )
        envelope = Envelope("cmpl-1", 5, "tiny", False, False, token_bytes=lambda token_id: bytes([token_id]))
        answer = ChatFormat(envelope) if chat else CompletionFormat(envelope)
        specs = [make_spec(max_tokens) for _ in range(prompts)]
        loop_deadline = asyncio.get_running_loop().time() + 60
        arguments = (lambda: GenerationGroup(state, specs), answer, "rid", loop_deadline)
        extra = {"with_usage": False, "with_empty_text": False}
        self.response = EventStream(*arguments, **extra) if stream else WholeAnswer(*arguments, num_made=1, num_shown=1)
        self.task = asyncio.ensure_future(
            self.response({"type": "http"}, self.connection.receive, self.connection.send)
        )

    async def begun(self) -> str:
        """The transfer_id, once its reservation was granted."""
        await settle()
        transfer_id = self.bench.decodes[0].pop_command().reserve.spec.transfer_id
        self.bench.decodes[0].reserved(transfer_id)
        return transfer_id

    def emit(self, transfer_id: str, first_index: int, text: str, **fields) -> None:
        leg = self.bench.prefills[0] if first_index == 0 else self.bench.decodes[0]
        leg.output(transfer_id, first_index=first_index, token_ids=list(text.encode()), **fields)


async def test_a_slow_reader_finds_all_that_was_missed_in_one_chunk():
    serving = Serving()
    transfer_id = await serving.begun()
    serving.emit(transfer_id, 0, "a")
    await settle()
    serving.connection.unblocked.clear()
    serving.emit(transfer_id, 1, "b")
    await settle()
    for index in range(2, 150):
        serving.emit(transfer_id, index, "x")
        await settle()
    serving.emit(transfer_id, 150, "z", finish_reason="STOP", leg_ended=True)
    serving.bench.prefills[0].output(transfer_id, leg_ended=True)
    serving.connection.unblocked.set()
    await serving.task
    texts = [event["choices"][0]["text"] for event in serving.connection.events[:-1]]
    assert texts == ["a", "b", "x" * 148 + "z"]
    assert serving.connection.events[-1] == "[DONE]"
    assert serving.bench.all_idle()


async def test_chat_says_the_role_once_and_first():
    serving = Serving(chat=True)
    transfer_id = await serving.begun()
    serving.emit(transfer_id, 0, "a")
    await settle()
    serving.bench.prefills[0].output(transfer_id, leg_ended=True)
    serving.emit(transfer_id, 1, "b", finish_reason="STOP", leg_ended=True)
    await serving.task
    deltas = [event["choices"][0]["delta"] for event in serving.connection.events[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_is_an_http_status(stream):
    serving = Serving(stream=stream)
    transfer_id = await serving.begun()
    serving.bench.decodes[0].output(transfer_id, error="INTERNAL")
    await serving.task
    assert serving.connection.status == 500
    assert orjson.loads(serving.connection.writes[0])["error"]["message"] == "played"
    assert serving.bench.all_idle()


async def test_an_error_after_a_token_is_an_event_that_ends_the_stream():
    serving = Serving()
    transfer_id = await serving.begun()
    serving.emit(transfer_id, 0, "a")
    await settle()
    serving.bench.decodes[0].output(transfer_id, error="INTERNAL")
    await serving.task
    first, last = serving.connection.events
    assert (first["choices"][0]["text"], last["error"]["code"]) == ("a", "internal_error")
    assert serving.connection.messages[-1]["more_body"] is False


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens_before", [0, 1])
async def test_a_client_that_leaves_ends_its_request(stream, tokens_before):
    serving = Serving(stream=stream)
    transfer_id = await serving.begun()
    if tokens_before:
        serving.emit(transfer_id, 0, "a")
        await settle()
    serving.connection.gone.set()
    await serving.task
    assert serving.bench.all_idle()
    assert serving.bench.decodes[0].commands_of("abort")
    assert serving.bench.prefills[0].commands_of("abort")


async def test_a_bug_while_streaming_is_told_in_the_stream_and_ends_the_request(monkeypatch):
    serving = Serving()
    transfer_id = await serving.begun()
    serving.emit(transfer_id, 0, "a")
    await settle()
    monkeypatch.setattr(CompletionFormat, "chunk", lambda *_: 1 / 0)
    serving.emit(transfer_id, 1, "b")
    await serving.task
    last = serving.connection.events[-1]["error"]
    assert (last["code"], "rid" in last["message"], "division" in last["message"]) == ("internal_error", True, False)
    assert serving.bench.all_idle()


async def test_one_prompts_failure_is_the_whole_answers():
    serving = Serving(stream=False, prompts=2)
    await settle()
    ids = [command.reserve.spec.transfer_id for command in serving.bench.decodes[0].commands]
    serving.bench.decodes[0].output(ids[0], error="INTERNAL")
    await serving.task
    assert serving.connection.status == 500
    assert serving.bench.all_idle()
    assert [c.abort.transfer_id for c in serving.bench.decodes[0].commands_of("abort")] == [ids[1]]
