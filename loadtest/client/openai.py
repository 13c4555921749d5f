"""Any OpenAI-compatible server over HTTP: completions (token ids or text) and chat, always streamed."""

from __future__ import annotations

import time
from typing import Any, Final, Literal

import orjson

from loadtest.client.http1 import (
    Address,
    BadResponseError,
    ConnectFailedError,
    DisconnectedError,
    HttpClient,
    parse_url,
)
from loadtest.client.sse import SseSplitter
from loadtest.client.target import GenerationOptions, Send, TargetInfo
from loadtest.prompts import Prompt
from loadtest.record import Failure, RequestRecord, TargetError
from loadtest.streams import StreamSpec

Api = Literal["completions", "chat"]
_PROBE_TIMEOUT_S: Final = 10.0
_MAX_ERROR_BODY: Final = 64 << 10


class StreamSink:
    """Writes one streamed response into its record, as the events come."""

    __slots__ = ("_error_body", "_record", "_splitter", "_status")

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._splitter = SseSplitter()
        self._status = 0
        self._error_body = b""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def on_body(self, data: bytes, now_s: float) -> None:
        """Raises ValueError for an event that is not JSON (orjson's error is one)."""
        if self._status != 200:
            self._error_body = (self._error_body + data)[:_MAX_ERROR_BODY]
            return
        self._record.end_s = now_s
        for event in self._splitter.feed(data):
            if event != b"[DONE]":
                self._take(orjson.loads(event), now_s)

    def finish(self) -> None:
        """The response is complete."""
        if self._status != 200:
            self._record.fail(Failure.HTTP_STATUS, _error_text(self._error_body), str(self._status))

    def _take(self, event: Any, now_s: float) -> None:
        record = self._record
        if not isinstance(event, dict):
            raise ValueError("an event is not a JSON object")
        if choices := event.get("choices"):
            self._take_choice(choices[0], now_s)
        if usage := event.get("usage"):
            record.usage_prompt_tokens = usage.get("prompt_tokens")
            record.usage_output_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details")
            record.usage_cached_tokens = details.get("cached_tokens") if details else None
        if (error := event.get("error")) or event.get("object") == "error":
            record.fail(Failure.STREAM_ERROR, _message_of(error or event))

    def _take_choice(self, choice: Any, now_s: float) -> None:
        record = self._record
        token_ids = choice.get("token_ids")
        text = choice.get("text")
        if text is None:
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if token_ids or text:
            record.events_s.append(now_s)
            record.event_tokens += len(token_ids) if token_ids else 1
            if record.keep_answer:
                record.answer_text.append(text or "")
                record.answer_ids.extend(token_ids or ())
        if reason := choice.get("finish_reason"):
            record.finish_reason = reason


class OpenAITarget:
    """A server at http://host:port, with or without /v1 at the end of the URL."""

    def __init__(self, url: str, api: Api, options: GenerationOptions, *, api_key: str = "") -> None:
        self._url = url
        self._api = api
        self._options = options
        self._api_key = api_key
        self.address: Address = parse_url(url)
        self.prefix = self.address.path.removesuffix("/v1")
        self._http = HttpClient(self.address, keep_alive=options.keep_alive)
        self._model = options.model
        self._path = f"{self.prefix}/v1/" + ("chat/completions" if api == "chat" else "completions")

    async def open(self) -> TargetInfo:
        await self._http.open()
        path = f"{self.prefix}/v1/models"
        try:
            answer = await self._http.get(path, self._headers(self._api_key), _PROBE_TIMEOUT_S)
        except (ConnectFailedError, DisconnectedError, BadResponseError, TimeoutError) as e:
            raise TargetError(f"{self._url}: no server answers ({e or 'timed out'}); is it started?") from e
        listed = _models(answer.body) if answer.status == 200 else []
        if not self._model:
            if not listed:
                raise TargetError(f"{self._url}{path}: names no model (HTTP {answer.status}); give --model")
            self._model = str(listed[0].get("id", ""))
        length = next((m.get("max_model_len") for m in listed if m.get("id") == self._model), 0)
        max_model_len = length if isinstance(length, int) else 0
        return TargetInfo(self._url, self._api, self._model, max_model_len)

    def prepare(self, stream: StreamSpec, prompt: Prompt, max_tokens: int, *, keep_answer: bool) -> Send:
        body = orjson.dumps(self._body(stream, prompt, max_tokens, keep_answer), option=orjson.OPT_SERIALIZE_NUMPY)
        request = self._http.head("POST", self._path, self._headers(stream.api_key), len(body)) + body

        async def send(record: RequestRecord) -> None:
            await self._send(request, record)

        return send

    async def close(self) -> None:
        self._http.close()

    def _body(self, stream: StreamSpec, prompt: Prompt, max_tokens: int, keep_answer: bool) -> dict[str, object]:
        options = self._options
        body: dict[str, object] = {"model": self._model}
        if self._api == "chat":
            messages = prompt if isinstance(prompt, tuple) else (("user", prompt),)
            body["messages"] = [{"role": role, "content": content} for role, content in messages]
        else:
            body["prompt"] = prompt
        body |= {"max_tokens": max_tokens, "temperature": options.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.token_ids or (keep_answer and self._api == "completions"):
            body["return_token_ids"] = True
        if stream.priority:
            body["priority"] = int(stream.priority) if stream.priority.lstrip("-").isdigit() else stream.priority
        if stream.cache_salt:
            body["cache_salt"] = stream.cache_salt
        return body | dict(options.extra_body)

    def _headers(self, api_key: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        return headers | dict(self._options.headers)

    async def _send(self, request: bytes, record: RequestRecord) -> None:
        sink = StreamSink(record)
        record.sent_s = time.perf_counter()
        try:
            await self._http.send(request, sink)
            sink.finish()
        except ConnectFailedError as e:
            record.fail(Failure.CONNECT, str(e))
        except DisconnectedError as e:
            record.fail(Failure.DISCONNECT, str(e))
        except BadResponseError as e:
            record.fail(Failure.PROTOCOL, str(e))


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        data = orjson.loads(body)
        return [m for m in data["data"] if isinstance(m, dict)]
    except (ValueError, KeyError, TypeError):
        return []


def _message_of(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _error_text(body: bytes) -> str:
    """The message of an OpenAI error body, else the start of whatever came."""
    try:
        data = orjson.loads(body)
    except ValueError:
        return body[:200].decode(errors="replace")
    return _message_of(data.get("error", data)) if isinstance(data, dict) else str(data)
