"""One prefill and one decode worker that speak Baton's worker protocol and compute nothing, for measuring routers.

    python -m loadtest.router_cost.mock_workers REDIS_URL CLUSTER FINGERPRINT GAP_S [PREFILL_RATE]

Prompts are computed one after the other at PREFILL_RATE tokens/s; without one, at once. Then every sequence gets a
token each GAP_S, all of a step in one frame, as a decode worker sends them.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from redis.asyncio import Redis

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from common.registry import Role, WorkerRecord, encode_record, worker_key, workers_key

NUM_BLOCKS = 1 << 20
FIRST_TOKEN_ID = 300


@dataclass(slots=True)
class _Sequence:
    transfer_id: str
    num_tokens: int
    max_tokens: int


class MockWorker(worker_pb2_grpc.WorkerServiceServicer):
    """peers: by reservation secret, what the prefill worker tells the decode worker."""

    def __init__(
        self, role: Role, fingerprint: str, commits: dict[bytes, asyncio.Future[None]], gap_s: float, rate: float
    ) -> None:
        self.role = role
        self.worker_id = f"mock-{role}"
        self.epoch = secrets.token_hex(8)
        self.fingerprint = fingerprint
        self._commits = commits
        self._gap_s = gap_s
        self._rate = rate
        self._free_at = 0.0

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:  # noqa: N802
        return worker_pb2.GetInfoResponse(
            worker_id=self.worker_id, epoch=self.epoch, model_fingerprint=self.fingerprint
        )

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker is no real one")

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> None:
        await anext(request_iterator)
        info = await self.GetInfo(None, context)
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        running: dict[str, _Sequence] = {}
        outbox.put_nowait(worker_pb2.SessionResponse(welcome=worker_pb2.Welcome(info=info)))
        tasks = [asyncio.create_task(self._read(request_iterator, outbox, running))]
        if self.role == "decode":
            tasks.append(asyncio.create_task(self._steps(outbox, running)))
        try:
            while True:
                await context.write(await outbox.get())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Any], outbox: asyncio.Queue[Any], running: dict[str, Any]) -> None:
        waiting: set[asyncio.Task[None]] = set()
        async for request in requests:
            kind = request.WhichOneof("frame")
            if kind == "abort":
                running.pop(request.abort.transfer_id, None)
            elif kind == "prefill":
                self._queue_prefill(request.prefill, outbox)
            elif kind == "reserve" and request.reserve.prefill_here:
                spec = request.reserve.spec
                running[spec.transfer_id] = _Sequence(spec.transfer_id, 0, spec.sampling.max_tokens)
            elif kind == "reserve":
                spec, secret = request.reserve.spec, secrets.token_bytes(16)
                self._commits[secret] = committed = asyncio.get_running_loop().create_future()
                target = worker_pb2.TransferTarget(
                    address="mock:1", worker_id=self.worker_id, epoch=self.epoch, secret=secret
                )
                reserved = worker_pb2.Reserved(transfer_id=spec.transfer_id, target=target)
                outbox.put_nowait(worker_pb2.SessionResponse(reserved=reserved))
                sequence = _Sequence(spec.transfer_id, 1, spec.sampling.max_tokens)
                task = asyncio.create_task(self._join(committed, sequence, outbox, running))
                waiting.add(task)
                task.add_done_callback(waiting.discard)

    def _queue_prefill(self, command: Any, outbox: asyncio.Queue[Any]) -> None:
        if not self._rate:
            self._prefill(command, outbox)
            return
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + len(command.spec.token_ids) / self._rate
        loop.call_at(self._free_at, self._prefill, command, outbox)

    def _prefill(self, command: Any, outbox: asyncio.Queue[Any]) -> None:
        spec = command.spec
        reason = (
            common_pb2.FINISH_REASON_LENGTH if spec.sampling.max_tokens == 1 else common_pb2.FINISH_REASON_UNSPECIFIED
        )
        output = worker_pb2.SequenceOutput(
            transfer_id=spec.transfer_id, first_index=0, token_ids=[FIRST_TOKEN_ID], finish_reason=reason,
            leg_ended=True, timings=worker_pb2.Timings(prefill_s=0.001),
        )  # fmt: skip
        outbox.put_nowait(step([output]))
        committed = self._commits.pop(command.target.secret, None)
        if committed is not None:
            committed.set_result(None)

    async def _join(
        self, committed: asyncio.Future[None], sequence: _Sequence, outbox: asyncio.Queue[Any], running: dict[str, Any]
    ) -> None:
        await committed
        if sequence.max_tokens == 1:
            output = worker_pb2.SequenceOutput(
                transfer_id=sequence.transfer_id, leg_ended=True, finish_reason=common_pb2.FINISH_REASON_LENGTH
            )
            outbox.put_nowait(step([output]))
        else:
            running[sequence.transfer_id] = sequence

    async def _steps(self, outbox: asyncio.Queue[Any], running: dict[str, _Sequence]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._gap_s, loop.time())
            await asyncio.sleep(due - loop.time())
            outputs = [self._next(sequence) for sequence in running.values()]
            for output in outputs:
                if output.leg_ended:
                    del running[output.transfer_id]
            if outputs:
                outbox.put_nowait(step(outputs))

    def _next(self, sequence: _Sequence) -> Any:
        index = sequence.num_tokens
        sequence.num_tokens += 1
        output = worker_pb2.SequenceOutput(
            transfer_id=sequence.transfer_id, first_index=index, token_ids=[FIRST_TOKEN_ID + index % 997]
        )
        if sequence.num_tokens >= sequence.max_tokens:
            output.finish_reason = common_pb2.FINISH_REASON_LENGTH
            output.leg_ended = True
        return output


def step(outputs: list[Any]) -> Any:
    load = worker_pb2.LoadReport(num_blocks=NUM_BLOCKS, num_free_blocks=NUM_BLOCKS)
    return worker_pb2.SessionResponse(step=worker_pb2.StepOutput(outputs=outputs, load=load))


async def main(redis_url: str, cluster: str, fingerprint: str, gap_s: float, rate: float) -> None:
    commits: dict[bytes, asyncio.Future[None]] = {}
    roles: tuple[Role, ...] = ("prefill", "decode")
    servers = []  # one that nobody holds is gone
    async with Redis.from_url(redis_url) as redis:
        for role in roles:
            worker = MockWorker(role, fingerprint, commits, gap_s, rate)
            options = (("grpc.http2.min_ping_interval_without_data_ms", 100), ("grpc.so_reuseport", 0))
            server = grpc.aio.server(options=options)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            servers.append(server)
            record = WorkerRecord(
                worker_id=worker.worker_id, epoch=worker.epoch, role=role, grpc_address=f"127.0.0.1:{port}",
                model_name="mock", model_fingerprint=fingerprint, dtype="float32", block_size=16,
                num_blocks=NUM_BLOCKS, max_model_len=1 << 17,
            )  # fmt: skip
            await redis.sadd(workers_key(cluster), worker.worker_id)
            await redis.set(worker_key(cluster, worker.worker_id), encode_record(record))
        await asyncio.Event().wait()


if __name__ == "__main__":
    prefill_rate = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), prefill_rate))
