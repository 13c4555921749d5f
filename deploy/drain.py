"""Tells a worker to drain: `baton drain`. The worker's own Drain call does the work (common/worker/host.py)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, cast

import grpc
from redis.exceptions import RedisError

from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from common.config import Settings
from common.errors import StartupError
from common.redis_client import RedisTimeouts, connect
from common.registry import WorkerRecord, decode_record, worker_key, workers_key

ANSWER_S: Final = 5.0


async def drain_worker(settings: Settings, worker_id: str, url: str, grace_s: float | None, *, wait: bool) -> None:
    """By the address `url`, or else by its id. Raises StartupError."""
    if bool(worker_id) == bool(url):
        raise StartupError("name one worker: by its id, or by --url HOST:PORT")
    if url:
        await drain(url, "", grace_s, wait=wait)
        return
    record = await find_worker(settings, worker_id)
    await drain(record.grpc_address, record.epoch, grace_s, wait=wait)


async def find_worker(settings: Settings, worker_id: str) -> WorkerRecord:
    """From the registry. Raises StartupError, one line, naming the workers that there are."""
    url = settings.redis_url.get_secret_value()
    if not url:
        raise StartupError("which cluster? Name its Redis with --redis-url, or the worker itself with --url HOST:PORT")
    client = connect(url, RedisTimeouts(connect_s=ANSWER_S, answer_s=ANSWER_S))
    try:
        value = cast(bytes | None, await client.get(worker_key(settings.cluster, worker_id)))
        if value is None:
            members = cast(set[bytes], await client.smembers(workers_key(settings.cluster)))
            known = sorted(name.decode() for name in members)
            raise StartupError(f"no worker {worker_id} is registered; there are: {', '.join(known) or 'none'}")
    except (RedisError, OSError) as error:
        raise StartupError(f"Redis does not answer: {error or type(error).__name__}") from None
    finally:
        await client.aclose()
    return decode_record(value)


async def drain(address: str, epoch: str = "", grace_s: float | None = None, *, wait: bool = True) -> None:
    """Returns when the worker is gone, or has heard it (wait=False). Raises StartupError where it can't be reached, is
    another incarnation than `epoch`, or stays."""
    request = worker_pb2.DrainRequest(epoch=epoch)
    if grace_s is not None:
        request.grace_ms = round(grace_s * 1e3)
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.Drain(request, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            raise StartupError(f"worker at {address} did not take it: {error.details()}", exit_code=1) from None
        if wait and not await _is_gone(channel, answer.timeout_ms / 1e3):
            raise StartupError(f"worker at {address} is still there after {answer.timeout_ms / 1e3:.0f} s", exit_code=1)


async def _is_gone(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """The connection that carried the call stays until the worker ends it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            state = channel.get_state()
            while state is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
                state = channel.get_state()
            return True
    return False
