"""Both worker services in this process, over real gRPC, UCX and Redis, and a router's session with each."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client.parser import text_string_to_metric_families

from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from common.config import Settings
from common.engine.batch import ScheduledSequence
from common.engine.model_runner import ModelRunner
from common.kvcache.block_hash import hash_seed
from common.kvcache.kv_cache import KvCache
from common.sampling_params import FinishReason, SamplingParams
from common.worker.info import WorkerInfo
from common.worker.loading import LoadedModel
from decode_service.app import serve as serve_decode
from prefill_service.app import serve as serve_prefill

BOUND_S = 20.0


@dataclass
class RunningWorker:
    """One service, from ready until `stop`."""

    info: WorkerInfo
    stop_event: asyncio.Event
    task: asyncio.Task[None]

    async def stop(self) -> None:
        self.stop_event.set()
        await asyncio.wait_for(self.task, BOUND_S)


async def start_worker(role: str, settings: Settings, loaded: LoadedModel) -> RunningWorker:
    serve = serve_prefill if role == "prefill" else serve_decode
    checked = settings.model_copy(update={"check_when_idle": True})
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(checked, loaded, stop, ready.set_result))
    await asyncio.wait({task, ready}, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        stop.set()
        await task
    return RunningWorker(ready.result(), stop, task)


@asynccontextmanager
async def worker(role: str, settings: Settings, loaded: LoadedModel) -> AsyncIterator[RunningWorker]:
    running = await start_worker(role, settings, loaded)
    try:
        yield running
    finally:
        await running.stop()


@dataclass
class Leg:
    """What one worker said of one transfer id."""

    outputs: list[worker_pb2.SequenceOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [t for o in self.outputs for t in o.token_ids]

    @property
    def last(self) -> worker_pb2.SequenceOutput:
        return self.outputs[-1]

    @property
    def ended(self) -> bool:
        return bool(self.outputs) and self.last.leg_ended


class RouterSession:
    """A router's session with one worker, as far as a test needs it."""

    def __init__(self, info: WorkerInfo, *, epoch: str | None = None, read: bool = True) -> None:
        self.info = info
        self.epoch = info.epoch if epoch is None else epoch
        self.legs: dict[str, Leg] = defaultdict(Leg)
        self.targets: dict[str, worker_pb2.TransferTarget] = {}
        self.loads: list[worker_pb2.LoadReport] = []
        self.welcome: worker_pb2.Welcome | None = None
        self.num_step_frames = 0
        self.num_output_frames = 0
        self.error: grpc.aio.AioRpcError | None = None
        self.over = False
        self._read = read
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()

    async def __aenter__(self) -> RouterSession:
        self._channel = grpc.aio.insecure_channel(self.info.grpc_address)
        self.call = worker_pb2_grpc.WorkerServiceStub(self._channel).Session()
        await self.send(hello=worker_pb2.Hello(router_id="router-test", epoch=self.epoch))
        self._reader = asyncio.create_task(self._read_frames()) if self._read else None
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def send(self, **frame: object) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self.call.write(worker_pb2.SessionRequest(**frame))  # type: ignore[arg-type]

    @property
    def load(self) -> worker_pb2.LoadReport | None:
        return self.loads[-1] if self.loads else None

    async def abort(self, transfer_id: str) -> None:
        await self.send(abort=worker_pb2.AbortCommand(transfer_id=transfer_id))

    async def until(self, condition: Callable[[], object]) -> None:
        """Raises TimeoutError where it does not come true, and what ended the session where that came first."""

        def decided() -> bool:
            return bool(condition()) or self.over

        async with asyncio.timeout(BOUND_S), self._changed:
            await self._changed.wait_for(decided)
        if not condition():
            raise self.error or AssertionError("the session ended")

    async def ended(self, transfer_id: str) -> Leg:
        await self.until(lambda: self.legs[transfer_id].ended)
        return self.legs[transfer_id]

    async def until_idle(self) -> worker_pb2.LoadReport:
        """Nothing runs or waits, and every block is free."""
        await self.until(
            lambda: (
                self.load is not None
                and self.load.num_running == self.load.num_waiting == 0
                and self.load.num_free_blocks == self.load.num_blocks
            )
        )
        assert self.load is not None
        return self.load

    async def _read_frames(self) -> None:
        try:
            while isinstance(frame := await self.call.read(), worker_pb2.SessionResponse):
                self._take(frame)
                async with self._changed:
                    self._changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self.over = True
            async with self._changed:
                self._changed.notify_all()

    def _take(self, frame: worker_pb2.SessionResponse) -> None:
        match frame.WhichOneof("frame"):
            case "welcome":
                self.welcome = frame.welcome
            case "reserved":
                self.targets[frame.reserved.transfer_id] = frame.reserved.target
            case "step":
                self.num_step_frames += 1
                self.num_output_frames += bool(frame.step.outputs)
                self.loads.append(frame.step.load)
                for output in frame.step.outputs:
                    self.legs[output.transfer_id].outputs.append(output)


def make_spec(
    transfer_id: str,
    token_ids: Sequence[int],
    info: WorkerInfo,
    *,
    max_tokens: int = 8,
    temperature: float = 0.0,
    seed: int = 0,
    timeout_ms: int = 60_000,
    num_prompt_tokens: int | None = None,
    stop_token_ids: Sequence[int] = (),
) -> worker_pb2.SequenceSpec:
    return worker_pb2.SequenceSpec(
        transfer_id=transfer_id,
        request_id=f"r-{transfer_id}",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        hash_seed=hash_seed(info.model_fingerprint),
        sampling=worker_pb2.SamplingParams(
            temperature=temperature, top_p=1.0, seed=seed, max_tokens=max_tokens, stop_token_ids=stop_token_ids
        ),
        timeout_ms=timeout_ms,
    )


async def generate(
    prefill: RouterSession, decode: RouterSession, spec: worker_pb2.SequenceSpec
) -> tuple[list[int], Leg, Leg]:
    """One request over both workers, as a router does it. Returns the tokens in order of their index, and both legs."""
    await decode.send(reserve=worker_pb2.ReserveCommand(spec=spec))
    await decode.until(lambda: spec.transfer_id in decode.targets)
    await prefill.send(prefill=worker_pb2.PrefillCommand(spec=spec, target=decode.targets[spec.transfer_id]))
    legs = await asyncio.gather(prefill.ended(spec.transfer_id), decode.ended(spec.transfer_id))
    by_index = {o.first_index + i: t for leg in legs for o in leg.outputs for i, t in enumerate(o.token_ids)}
    first = len(spec.token_ids) - spec.num_prompt_tokens
    assert sorted(by_index) == list(range(first, first + len(by_index))), "a token is missing or came twice"
    assert sum(len(leg.tokens) for leg in legs) == len(by_index)
    return [by_index[i] for i in sorted(by_index)], *legs


def reference(loaded: LoadedModel, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """The same weights, alone, without chunks, transfer or scheduler."""
    layout = loaded.fmt.layout
    num_blocks = -(-(len(prompt) + sampling.max_tokens) // layout.block_size)
    model = loaded.runner._model
    runner = ModelRunner(model, KvCache(layout, num_blocks, loaded.kv_cache.device))
    tokens, output = list(prompt), []
    start, reason = 0, None
    while reason is None:
        table = range(-(-len(tokens) // layout.block_size))
        (token,) = runner.execute([ScheduledSequence(tokens[start:], start, table, sampling, len(output))]).token_ids
        assert token is not None
        start = len(tokens)
        tokens.append(token)
        output.append(token)
        reason = sampling.finish_reason(token, len(output))
        if len(tokens) >= loaded.max_model_len:
            reason = FinishReason.LENGTH
    return output


async def scrape(info: WorkerInfo) -> dict[str, float]:
    """Metric name with labels → value, from the worker's own endpoint."""

    def fetch() -> str:
        with urllib.request.urlopen(info.metrics_url, timeout=BOUND_S) as response:
            return response.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(fetch))
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def metric(info: WorkerInfo, name: str) -> float:
    return (await scrape(info))[name]
