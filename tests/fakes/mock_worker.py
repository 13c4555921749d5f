"""Prefill and decode workers that speak the real protocol over real gRPC and compute nothing: made-up tokens, no KV.

    token i of a prompt is scripted_token(prompt, i), whichever worker emits it and however often the request moved,
    so that a text which survives a worker's death can be compared with an undisturbed one.

The transfer between the two is a MockWire, a dictionary in this process. Everything that a test wants to order (steps,
first tokens) waits for a Gate; nothing sleeps.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from redis.asyncio import Redis

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from common.registry import Role, WorkerRecord, encode_record, worker_key, workers_key

Script = Callable[[Sequence[int], int], int]
SERVER_OPTIONS = (
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
)


def scripted_token(prompt: Sequence[int], index: int) -> int:
    """Some token that is no special one, different from its neighbours, the same for the same prompt."""
    return 3 + (sum(prompt) * 7 + len(prompt) * 13 + index * 29) % 250


class Gate:
    """Open by default; once closed, each `permit` lets one waiter through."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(0)
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def permit(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()

    async def passed(self) -> None:
        if self._open.is_set():
            return
        opened = asyncio.ensure_future(self._open.wait())
        permitted = asyncio.ensure_future(self._permits.acquire())
        try:
            await asyncio.wait((opened, permitted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (opened, permitted):
                task.cancel()
            await asyncio.gather(opened, permitted, return_exceptions=True)


class MockWire:
    """Instead of UCX: secret of a reservation → what the prefill worker commits."""

    def __init__(self) -> None:
        self._commits: dict[bytes, asyncio.Future[bool]] = {}

    def expect(self, secret: bytes) -> asyncio.Future[bool]:
        self._commits[secret] = asyncio.get_running_loop().create_future()
        return self._commits[secret]

    def commit(self, secret: bytes, *, ended: bool) -> None:
        """ended: the first token was the last."""
        waiting = self._commits.pop(secret, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(ended)

    def forget(self, secret: bytes) -> None:
        self._commits.pop(secret, None)


@dataclass
class Failure:
    """The next leg that comes to this point fails with `kind`. after_tokens: emitted by this leg before."""

    kind: str
    after_tokens: int = 0


@dataclass
class _Sequence:
    spec: worker_pb2.SequenceSpec
    task: asyncio.Task[None] | None = None

    @property
    def prompt(self) -> Sequence[int]:
        return self.spec.token_ids[: self.spec.num_prompt_tokens]

    @property
    def base(self) -> int:
        """Output tokens that came with the command."""
        return len(self.spec.token_ids) - self.spec.num_prompt_tokens


@dataclass
class _Peer:
    """One router's session."""

    outbox: asyncio.Queue[worker_pb2.SessionResponse] = field(default_factory=asyncio.Queue)
    sequences: dict[str, _Sequence] = field(default_factory=dict)


class MockWorker(worker_pb2_grpc.WorkerServiceServicer):
    """start() it, then stop() (clean) or kill() (every session breaks; the record stays until its lease is over).

    seen: specs in the order of their commands. aborted: transfer_ids of abort commands for live sequences.
    """

    def __init__(
        self,
        role: Role,
        wire: MockWire,
        fingerprint: str,
        *,
        worker_id: str = "",
        block_size: int = 16,
        num_blocks: int = 1000,
        cached_tokens: int = 0,
        script: Script = scripted_token,
        step_s: float = 0.0,
    ) -> None:
        self.role = role
        self.worker_id = worker_id or f"{role}-{secrets.token_hex(3)}"
        self.epoch = secrets.token_hex(8)
        self.seen: list[worker_pb2.SequenceSpec] = []
        self.aborted: list[str] = []
        self.failures: list[Failure] = []
        self.reservations = Gate()
        self.first_tokens = Gate()
        self.last_frames = Gate()
        self.steps = Gate()
        self.changed = asyncio.Condition()
        self._wire = wire
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._cached_tokens = cached_tokens
        self._script = script
        self._step_s = step_s
        self._peers: list[_Peer] = []
        self._server: grpc.aio.Server | None = None
        self.address = ""

    # -- life

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def register(self, redis: Redis, cluster: str, *, draining: bool = False) -> None:
        """Without a lease's expiry: a test says itself when a record goes."""
        await redis.sadd(workers_key(cluster), self.worker_id)
        await redis.set(worker_key(cluster, self.worker_id), encode_record(self.record(draining=draining)))

    async def unregister(self, redis: Redis, cluster: str) -> None:
        await redis.delete(worker_key(cluster, self.worker_id))

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def record(self, *, draining: bool = False) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            grpc_address=self.address,
            model_name="tiny",
            model_fingerprint=self._fingerprint,
            dtype="float32",
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            max_model_len=512,
            draining=draining,
        )

    @property
    def live(self) -> set[str]:
        """transfer_ids of sequences that hold something here."""
        return {transfer_id for peer in self._peers for transfer_id in peer.sequences}

    async def until(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Returns once `condition()` holds; looked at whenever this worker's state changes."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def _tick(self) -> None:
        """The next multiple of step_s: sequences that run together are answered in one frame."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._step_s - loop.time() % self._step_s if self._step_s else 0)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # -- protocol

    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        role = worker_pb2.ROLE_PREFILL if self.role == "prefill" else worker_pb2.ROLE_DECODE
        return worker_pb2.GetInfoResponse(
            worker_id=self.worker_id, epoch=self.epoch, role=role, model_fingerprint=self._fingerprint
        )

    async def Session(self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Any) -> None:
        first = await anext(request_iterator)
        if first.hello.epoch != self.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale epoch")
        info = await self.GetInfo(worker_pb2.GetInfoRequest(), context)
        await context.write(worker_pb2.SessionResponse(welcome=worker_pb2.Welcome(info=info)))
        peer = _Peer()
        self._peers.append(peer)
        reader = asyncio.create_task(self._read(peer, request_iterator))
        try:
            while True:
                for frame in merged([await peer.outbox.get(), *drained(peer.outbox)]):
                    await context.write(frame)
        finally:
            self._peers.remove(peer)
            reader.cancel()
            tasks = [s.task for s in peer.sequences.values() if s.task is not None]
            for task in tasks:
                task.cancel()
            peer.sequences.clear()
            await asyncio.gather(reader, *tasks, return_exceptions=True)
            await self._notify()

    async def _read(self, peer: _Peer, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("frame")
            if kind == "abort":
                await self._abort(peer, request.abort.transfer_id)
                continue
            command = request.reserve if kind == "reserve" else request.prefill
            sequence = _Sequence(command.spec)
            self.seen.append(command.spec)
            peer.sequences[command.spec.transfer_id] = sequence
            work = (
                self._decode(peer, sequence, command.prefill_here)
                if kind == "reserve"
                else self._prefill(peer, sequence, command.target)
            )
            sequence.task = asyncio.create_task(work)
            for fork in command.spec.forks:
                own = worker_pb2.SequenceSpec()
                own.CopyFrom(command.spec)
                own.transfer_id, own.sampling.seed = fork.transfer_id, fork.seed
                del own.forks[:]
                peer.sequences[fork.transfer_id] = _Sequence(own)
            await self._notify()

    async def _abort(self, peer: _Peer, transfer_id: str) -> None:
        sequence = peer.sequences.pop(transfer_id, None)
        if sequence is None:
            return
        self.aborted.append(transfer_id)
        if sequence.task is not None:
            sequence.task.cancel()
            await asyncio.gather(sequence.task, return_exceptions=True)
        self._send(peer, sequence, finish_reason=common_pb2.FINISH_REASON_ABORT, leg_ended=True)
        await self._notify()

    # -- the two legs

    async def _prefill(self, peer: _Peer, sequence: _Sequence, target: worker_pb2.TransferTarget) -> None:
        await self.first_tokens.passed()
        if await self._failed(peer, sequence, 0):
            return
        index = sequence.base
        token, reason = self._next(sequence, index)
        cached = self._cached_tokens
        group = [sequence, *self._forks(peer, sequence)]
        for each in group:
            self._send(peer, each, first_index=index, token_ids=[token], finish_reason=reason, num_cached_tokens=cached)
        self._wire.commit(target.secret, ended=reason != 0)
        await self.last_frames.passed()
        timings = worker_pb2.Timings(queue_s=0.001, prefill_s=0.002, transfer_s=0.003, transfer_bytes=4096)
        for each in [*self._forks(peer, sequence), sequence]:
            await self._end(peer, each, num_cached_tokens=cached, timings=timings)

    def _forks(self, peer: _Peer, sequence: _Sequence) -> list[_Sequence]:
        """Those that were not aborted; all continuations say the same here."""
        ids = [fork.transfer_id for fork in sequence.spec.forks]
        return [peer.sequences[transfer_id] for transfer_id in ids if transfer_id in peer.sequences]

    async def _decode(self, peer: _Peer, sequence: _Sequence, prefill_here: bool) -> None:
        index = sequence.base
        if not prefill_here:
            await self.reservations.passed()
            if await self._failed(peer, sequence, 0):
                return
            secret = secrets.token_bytes(16)
            committed = self._wire.expect(secret)
            target = worker_pb2.TransferTarget(
                address=self.address, worker_id=self.worker_id, epoch=self.epoch, secret=secret
            )
            reserved = worker_pb2.Reserved(transfer_id=sequence.spec.transfer_id, target=target)
            peer.outbox.put_nowait(worker_pb2.SessionResponse(reserved=reserved))
            try:
                ended = await committed
            finally:
                self._wire.forget(secret)
            index += 1
            if ended:
                for each in [*self._forks(peer, sequence), sequence]:
                    await self._end(peer, each, finish_reason=common_pb2.FINISH_REASON_LENGTH)
                return
        for fork in self._forks(peer, sequence):
            fork.task = asyncio.create_task(self._decode_on(peer, fork, index, prefill_here))
        await self._decode_on(peer, sequence, index, prefill_here)

    async def _decode_on(self, peer: _Peer, sequence: _Sequence, index: int, prefill_here: bool) -> None:
        emitted = 0
        timings = worker_pb2.Timings(decode_s=0.004)
        while True:
            await self.steps.passed()
            await self._tick()
            if await self._failed(peer, sequence, emitted):
                return
            token, reason = self._next(sequence, index)
            tokens: dict[str, Any] = {"first_index": index, "token_ids": [token]}
            if reason:
                cached = self._cached_tokens if prefill_here else 0
                await self._end(
                    peer, sequence, finish_reason=reason, timings=timings, num_cached_tokens=cached, **tokens
                )
                return
            self._send(peer, sequence, **tokens)
            index, emitted = index + 1, emitted + 1

    def _next(self, sequence: _Sequence, index: int) -> tuple[int, common_pb2.FinishReason]:
        sampling = sequence.spec.sampling
        token = self._script(sequence.prompt, index)
        if token in sampling.stop_token_ids:
            return token, common_pb2.FINISH_REASON_STOP
        if index + 1 >= sampling.max_tokens:
            return token, common_pb2.FINISH_REASON_LENGTH
        return token, common_pb2.FINISH_REASON_UNSPECIFIED

    async def _failed(self, peer: _Peer, sequence: _Sequence, emitted: int) -> bool:
        if not self.failures or self.failures[0].after_tokens > emitted:
            return False
        failure = self.failures.pop(0)
        kind = common_pb2.ErrorKind.Value(f"ERROR_KIND_{failure.kind}")
        await self._end(peer, sequence, error=common_pb2.ErrorDetail(kind=kind, message="as the test asked"))
        return True

    async def _end(self, peer: _Peer, sequence: _Sequence, **output: Any) -> None:
        peer.sequences.pop(sequence.spec.transfer_id, None)
        self._send(peer, sequence, leg_ended=True, **output)
        await self._notify()

    def _send(self, peer: _Peer, sequence: _Sequence, **output: Any) -> None:
        outputs = [worker_pb2.SequenceOutput(transfer_id=sequence.spec.transfer_id, **output)]
        load = worker_pb2.LoadReport(
            num_running=len(self.live), num_free_blocks=self._num_blocks - len(self.live), num_blocks=self._num_blocks
        )
        step = worker_pb2.StepOutput(outputs=outputs, load=load)
        peer.outbox.put_nowait(worker_pb2.SessionResponse(step=step))


def drained(queue: asyncio.Queue[worker_pb2.SessionResponse]) -> list[worker_pb2.SessionResponse]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def merged(frames: list[worker_pb2.SessionResponse]) -> list[worker_pb2.SessionResponse]:
    """Neighbouring steps as one, in order, with the last load."""
    result: list[worker_pb2.SessionResponse] = []
    for frame in frames:
        if result and frame.HasField("step") and result[-1].HasField("step"):
            result[-1].step.outputs.extend(frame.step.outputs)
            result[-1].step.load.CopyFrom(frame.step.load)
        else:
            result.append(frame)
    return result
