"""Baton's public gRPC API: one bidirectional Generate stream for each stream of load, many requests on it."""

from __future__ import annotations

import asyncio
import time
from typing import Final
from urllib.parse import urlsplit

import grpc
import grpc.aio

from baton.common.v1 import common_pb2
from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from loadtest.client.target import GenerationOptions, Send, TargetInfo
from loadtest.prompts import Prompt
from loadtest.record import Failure, RequestRecord, TargetError
from loadtest.streams import StreamSpec

_PROBE_TIMEOUT_S: Final = 10.0
_FINISH_NAMES: Final = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
Metadata = tuple[tuple[str, str], ...]


class _Session:
    """One Generate call: a reader task that hands frames to the records waiting for them, and a lock for writes.

    Owned by the target. `broken` once the call has ended: every request on it has then been failed.
    """

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, metadata: Metadata) -> None:
        self._call = stub.Generate(metadata=metadata)
        self._running: dict[str, tuple[RequestRecord, asyncio.Event]] = {}
        self._write_lock = asyncio.Lock()
        self.broken = False
        self._reader = asyncio.create_task(self._read(), name="bench-grpc-reader")

    async def run(self, start: inference_pb2.StartGeneration, record: RequestRecord) -> None:
        """One request from its start frame to its last frame. Cancelled: an abort frame is sent."""
        done = asyncio.Event()
        self._running[start.request_id] = (record, done)
        try:
            await self._write(inference_pb2.GenerateRequest(start=start))
            await done.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
            record.fail(Failure.DISCONNECT, f"the gRPC stream is closed: {e}")
        finally:
            if self._running.pop(start.request_id, None) and not self.broken and not done.is_set():
                abort = inference_pb2.AbortGeneration(request_id=start.request_id)
                await self._abort(inference_pb2.GenerateRequest(abort=abort))

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _write(self, frame: inference_pb2.GenerateRequest) -> None:
        # gRPC takes one write at a time on a call.
        async with self._write_lock:
            await self._call.write(frame)

    async def _abort(self, frame: inference_pb2.GenerateRequest) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            # The stream is gone, and with it the request.
            return

    async def _read(self) -> None:
        failure, code, detail = Failure.DISCONNECT, "", "the server ended the gRPC stream"
        try:
            async for frame in self._call:
                self._take(frame, time.perf_counter())
        except grpc.aio.AioRpcError as e:
            failure, code, detail = Failure.GRPC_STATUS, e.code().name.lower(), e.details() or ""
        finally:
            self.broken = True
            for record, done in self._running.values():
                record.fail(failure, detail, code)
                done.set()

    def _take(self, frame: inference_pb2.GenerateResponse, now_s: float) -> None:
        # Frames of requests given up meanwhile still come: nobody waits for them.
        record, done = self._running.get(frame.request_id, (None, None))
        if record is None or done is None:
            return
        match frame.WhichOneof("frame"):
            case "chunk":
                if frame.chunk.token_ids:
                    record.events_s.append(now_s)
                    record.event_tokens += len(frame.chunk.token_ids)
                if record.keep_answer:
                    record.answer_text.append(frame.chunk.text)
                    record.answer_ids.extend(frame.chunk.token_ids)
            case "finished":
                usage = frame.finished.usage
                record.end_s = now_s
                record.finish_reason = _FINISH_NAMES.get(frame.finished.finish_reason)
                record.usage_prompt_tokens = usage.prompt_tokens
                record.usage_cached_tokens = usage.cached_tokens
                record.usage_output_tokens = usage.completion_tokens
                done.set()
            case "error":
                kind = common_pb2.ErrorKind.Name(frame.error.kind).removeprefix("ERROR_KIND_").lower()
                # As over HTTP: a refusal goes by its code, a stream that breaks is a kind of its own.
                if record.events_s:
                    record.fail(Failure.STREAM_ERROR, f"{kind}: {frame.error.message}")
                else:
                    record.fail(Failure.GRPC_STATUS, frame.error.message, kind)
                done.set()


class GrpcTarget:
    """A Baton router at grpc://host:port."""

    def __init__(self, url: str, options: GenerationOptions, *, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "grpc" or not parts.netloc:
            raise TargetError(f"--url {url}: expected grpc://host:port")
        self._url = url
        self._address = parts.netloc
        self._options = options
        self._api_key = api_key
        self._model = options.model
        self._sessions: dict[str, _Session] = {}
        self._next_id = 0
        self._channel: grpc.aio.Channel | None = None
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub | None = None

    async def open(self) -> TargetInfo:
        limits = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
        self._channel = grpc.aio.insecure_channel(self._address, options=limits)
        # At run time the stub is one class for both kinds of channel.
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        request = inference_pb2.ListModelsRequest()
        try:
            answer = await self._stub.ListModels(request, timeout=_PROBE_TIMEOUT_S, metadata=_metadata(self._api_key))
        except grpc.aio.AioRpcError as e:
            raise TargetError(f"{self._url}: {e.code().name}: {e.details()}; is the router started?") from e
        models = {m.id: m.max_model_len for m in answer.models}
        if not self._model:
            if not models:
                raise TargetError(f"{self._url}: serves no model yet; wait until it is ready")
            self._model = next(iter(models))
        return TargetInfo(self._url, "grpc", self._model, models.get(self._model, 0))

    def prepare(self, stream: StreamSpec, prompt: Prompt, max_tokens: int, *, keep_answer: bool) -> Send:
        self._next_id += 1
        options = self._options
        start = inference_pb2.StartGeneration(
            request_id=f"bench-{self._next_id}",
            model=self._model,
            cache_salt=stream.cache_salt,
            timeout_ms=round(options.timeout_s * 1e3),
            sampling=inference_pb2.SamplingParams(
                temperature=options.temperature, max_tokens=max_tokens, ignore_eos=options.ignore_eos
            ),
        )
        if isinstance(prompt, str):
            start.text = prompt
        elif isinstance(prompt, tuple):
            start.chat.messages.extend(inference_pb2.ChatMessage(role=r, content=c) for r, c in prompt)
        else:
            start.tokens.token_ids.extend(prompt.tolist())

        async def send(record: RequestRecord) -> None:
            record.sent_s = time.perf_counter()
            await self._session(stream).run(start, record)

        return send

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        if self._channel is not None:
            await self._channel.close()

    def _session(self, stream: StreamSpec) -> _Session:
        session = self._sessions.get(stream.name)
        if session is None or session.broken:
            if self._stub is None:
                raise TargetError(f"{self._url}: used before open()")
            session = self._sessions[stream.name] = _Session(self._stub, _metadata(stream.api_key))
        return session


def _metadata(api_key: str) -> Metadata:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
