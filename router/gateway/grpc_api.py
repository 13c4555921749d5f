"""The public gRPC API: many generations on one stream, interleaved, each with exactly one end frame.

One reader takes the client's frames, one writer sends; a generation needs no task of its own.

    client half-closes   no more starts; what runs, finishes; then the stream ends
    client cancels       everything is aborted at once
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

import grpc

from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from common.errors import BatonError, ErrorKind, invalid
from common.rpc.convert import error_to_status
from common.sampling_params import FinishReason
from common.telemetry import get_logger
from router.gateway import grpc_convert as convert
from router.gateway.errors import as_baton_error
from router.gateway.generation import Generation, start_choices
from router.gateway.mailbox import ClosedMailboxError, Mailbox
from router.gateway.state import GatewayState
from router.gateway.validation import prepare
from router.spec import End, Finished, Operation, Usage
from router.tenancy.tenant import Tenant

MAX_REQUEST_ID_CHARS: Final = 128
# Error frames that a client which reads nothing can make us keep.
MAX_PENDING_ERRORS: Final = 1024
CLOSE_TIMEOUT_S: Final = 1.0
# A client that takes no frame for so long is given up, and with it all that runs on its stream.
WRITE_TIMEOUT_S: Final = 30.0

_log = get_logger(__name__)
Context: TypeAlias = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """A stream's generations live in its call; the streams are known only so that `drain` can end them."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._streams: set[_GenerateStream] = set()

    def drain(self) -> None:
        """Every stream ends as soon as nothing runs on it, as if its client had half-closed it."""
        for stream in self._streams:
            stream.drain()

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[inference_pb2.GenerateRequest], context: Context
    ) -> None:
        tenant = await self._tenant_of(context)
        stream = _GenerateStream(self._state, context, tenant)
        self._streams.add(stream)
        try:
            await stream.serve(request_iterator)
        finally:
            self._streams.discard(stream)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        await self._tenant_of(context)
        return inference_pb2.ListModelsResponse(models=[convert.model_to_proto(self._state.model)])

    async def _tenant_of(self, context: Any) -> Tenant:
        """Of the call's `authorization` metadata; ends the call where it may not go on."""
        try:
            return self._state.tenants.authenticate(_metadata_value(context, "authorization"))
        except BatonError as error:
            await context.abort(*error_to_status(error))
            raise


class _Wake:
    """In the mailbox: something beside the generations changed."""


class _Running:
    """The continuations of one request. It ends with the last of them, or with the first that fails."""

    def __init__(self, generations: list[Generation]) -> None:
        self.open = set(generations)
        self.num_choices = len(generations)
        self._usage = Usage(0, 0, 0)
        self._reason = FinishReason.STOP

    def note_end(self, generation: Generation, end: End | None) -> End | None:
        """One continuation's end; returns the request's, once it has one."""
        if end is None:
            return None
        self.open.discard(generation)
        if isinstance(end, BatonError):
            self.close()
            return end
        self._usage = self._usage.plus(end.usage)
        if generation.index == 0:
            self._reason = end.reason
        return None if self.open else Finished(self._reason, self._usage)

    def close(self) -> None:
        """Abort whatever still runs."""
        for generation in list(self.open):
            generation.close()


class _GenerateStream:
    def __init__(self, state: GatewayState, context: Context, tenant: Tenant) -> None:
        self._state = state
        self._context = context
        self._tenant = tenant
        self._mailbox: Mailbox[Generation | _Wake] = Mailbox()
        self._running: dict[str, _Running] = {}
        self._errors: deque[inference_pb2.GenerateResponse] = deque()
        self._wake = _Wake()
        self._no_more_starts = False
        self._stall: asyncio.TimerHandle | None = None
        # Why the stream can't go on; its status says so, lest requests without an end frame look like success.
        self._broken: BatonError | None = None
        # Of the stream, and so of all requests on it.
        self._traceparent = _metadata_value(context, "traceparent")

    def drain(self) -> None:
        self._no_more_starts = True
        self._mailbox.post(self._wake)

    async def serve(self, requests: AsyncIterator[inference_pb2.GenerateRequest]) -> None:
        reader = asyncio.create_task(self._read(requests))
        try:
            while not (self._no_more_starts and not self._running and not self._errors):
                await self._write_news(await self._mailbox.get())
        except ClosedMailboxError:
            pass
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._broken is None or task is None:
                raise
            task.uncancel()  # by _stalled
        finally:
            for running in self._running.values():
                running.close()
            self._running.clear()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        if self._broken is not None:
            # A client that reads nothing takes no status either.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._context.abort(*error_to_status(self._broken))

    # -- from the client

    async def _read(self, requests: AsyncIterator[inference_pb2.GenerateRequest]) -> None:
        try:
            async for request in requests:
                if request.HasField("start"):
                    await self._start(request.start)
                elif request.HasField("abort"):
                    self._abort(request.abort.request_id)
                else:
                    self._refuse("", invalid("a frame must hold start or abort"))
            self.drain()
        except Exception as error:
            # Without a reader nobody could abort: the stream is over, and the log says why.
            _log.info("client stream broke", reason=str(error) or type(error).__name__)
            self._break(invalid("a frame can't be read; what ran on this stream was aborted"))

    def _break(self, error: BatonError) -> None:
        self._broken = error
        self._mailbox.close()

    async def _start(self, start: inference_pb2.StartGeneration) -> None:
        state, request_id = self._state, start.request_id
        received_at, trace = state.clock(), state.sampler.start(self._traceparent)
        try:
            if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
                raise invalid(f"`request_id` must have 1 to {MAX_REQUEST_ID_CHARS} characters", "request_id")
            if request_id in self._running:
                raise invalid(f"`request_id` {request_id!r} is running on this stream already", "request_id")
            state.dispatcher.check_room(1, self._tenant)
            asked = convert.asked_from_proto(start, received_at, self._context.time_remaining(), trace, self._tenant)
            spec = await prepare(state, asked)
            post, new_detokenizer = self._mailbox.post, state.model.new_detokenizer
            self._running[request_id] = _Running(
                start_choices(spec, 0, state.dispatcher, new_detokenizer, post, state.metrics, state.clock)
            )
        except Exception as error:
            known = as_baton_error(error, request_id)
            operation: Operation = "chat" if start.HasField("chat") else "text_completion"
            state.refuse(known, request_id[:MAX_REQUEST_ID_CHARS], trace, operation, received_at)
            self._refuse(request_id, known)

    def _abort(self, request_id: str) -> None:
        """Its end frame is an error of kind CANCELLED; unknown ids may have ended this moment and are no error."""
        running = self._running.get(request_id)
        if running is not None:
            running.close()

    def _refuse(self, request_id: str, error: BatonError) -> None:
        self._errors.append(convert.error_to_proto(request_id, error))
        if len(self._errors) > MAX_PENDING_ERRORS:
            self._break(BatonError(ErrorKind.OVERLOADED, f"the client left {MAX_PENDING_ERRORS} error frames unread"))
        self._mailbox.post(self._wake)

    # -- to the client

    async def _write(self, frame: inference_pb2.GenerateResponse) -> None:
        self._stall = asyncio.get_running_loop().call_later(WRITE_TIMEOUT_S, self._stalled, asyncio.current_task())
        try:
            await self._context.write(frame)
        finally:
            self._stall.cancel()

    def _stalled(self, task: asyncio.Task[Any] | None) -> None:
        message = f"the client took no frame for {WRITE_TIMEOUT_S:g} s; what ran on this stream was aborted"
        self._broken = BatonError(ErrorKind.DEADLINE_EXCEEDED, message)
        if task is not None:
            task.cancel()

    async def _write_news(self, item: Generation | _Wake) -> None:
        while self._errors:
            await self._write(self._errors.popleft())
        if isinstance(item, _Wake):
            return
        request_id, running = item.request_id, self._running.get(item.request_id)
        if running is None or item not in running.open:
            return
        delta = item.take()
        end = running.note_end(item, delta.end)
        if end is not None:
            # Before the write: the id is free again when the client reads the end.
            del self._running[request_id]
        if delta.token_ids or delta.text or (running.num_choices > 1 and isinstance(delta.end, Finished)):
            await self._write(convert.chunk_to_proto(request_id, item.index, delta))
        item.mark_written()
        if isinstance(end, Finished):
            await self._write(convert.finished_to_proto(request_id, end))
        elif end is not None:
            await self._write(convert.error_to_proto(request_id, end))


def _metadata_value(context: Context, key: str) -> str:
    """Empty where the client sent none."""
    values = (value for name, value in context.invocation_metadata() or () if name == key)
    value = next(values, "")
    return value if isinstance(value, str) else ""
