"""The router's own request and session objects, joined to workers that a test plays by hand, frame by frame."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from baton.common.v1 import common_pb2
from baton.worker.v1 import worker_pb2
from common.errors import BatonError, ErrorKind
from common.registry import Role, WorkerRecord
from common.sampling_params import SamplingParams
from router.admission import Admission, Capacity
from router.cluster.worker_session import SessionState, WorkerSession
from router.dispatcher import Dispatcher
from router.placer import WorkerPair
from router.policy.admission import Targets
from router.policy.placement import room_elsewhere
from router.request_record import RequestRecord
from router.spec import GenerationSpec

PROMPT = list(range(10, 30))


def make_record(worker_id: str, role: Role, epoch: str = "e1") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id, epoch=epoch, role=role, grpc_address="127.0.0.1:1", model_name="m",
        model_fingerprint="f", dtype="float32", block_size=16, num_blocks=100, max_model_len=512,
    )  # fmt: skip


class PlayedWorker:
    """A session that is up without a connection. The test reads `commands` and answers with frames."""

    def __init__(self, worker_id: str, role: Role) -> None:
        self.session = WorkerSession(make_record(worker_id, role), "router", lambda: None, time.monotonic)
        self.session._state = SessionState.READY

    @property
    def commands(self) -> list[worker_pb2.SessionRequest]:
        return list(self.session._outbox)

    def pop_command(self) -> worker_pb2.SessionRequest:
        return self.session._outbox.popleft()

    def commands_of(self, kind: str) -> list[worker_pb2.SessionRequest]:
        return [c for c in self.commands if c.WhichOneof("frame") == kind]

    def reserved(self, transfer_id: str) -> None:
        target = worker_pb2.TransferTarget(address="there:1", worker_id="d", epoch="e1", secret=b"s" * 16)
        self.session._on_reserved(worker_pb2.Reserved(transfer_id=transfer_id, target=target))

    def output(self, transfer_id: str, **fields) -> None:
        if "error" in fields:
            kind = common_pb2.ErrorKind.Value(f"ERROR_KIND_{fields['error']}")
            fields |= {"error": common_pb2.ErrorDetail(kind=kind, message="played"), "leg_ended": True}
        if "finish_reason" in fields:
            fields["finish_reason"] = common_pb2.FinishReason.Value(f"FINISH_REASON_{fields['finish_reason']}")
        outputs = [worker_pb2.SequenceOutput(transfer_id=transfer_id, **fields)]
        self.session._on_step(worker_pb2.StepOutput(outputs=outputs))

    def lose(self) -> None:
        self.session._lose()

    @property
    def is_idle(self) -> bool:
        """Nothing of any request counts here any more."""
        table = self.session._subscriptions
        return (len(table), table.unanswered_prefill_tokens, table.unconfirmed_blocks) == (0, 0, 0)


@dataclass
class PlayedPlacer:
    """Takes the first connected worker of each role that has not failed; else a failed one; else none."""

    prefills: list[PlayedWorker]
    decodes: list[PlayedWorker]
    calls: list[set[str]] = field(default_factory=list)

    async def place(
        self, num_tokens: int, packed_hashes: bytes, failed: Collection[str] = (), *, wait: bool = False
    ) -> WorkerPair:
        self.calls.append(set(failed))
        prefill, decode = (self._pick(workers, failed) for workers in (self.prefills, self.decodes))
        if decode is None:
            raise BatonError(ErrorKind.NO_WORKER, "none", retry_after_s=1.0)
        return WorkerPair(prefill, decode, uncached_prefill_tokens=num_tokens, new_decode_blocks=2)

    @property
    def has_worker(self) -> bool:
        return any(w.session.ready for w in self.decodes)

    def has_room_elsewhere(self, decode_id: str, num_blocks: int) -> bool:
        loads = [w.session.load() for w in self.decodes]
        return room_elsewhere(num_blocks, decode_id, loads)

    def _pick(self, workers: list[PlayedWorker], failed: Collection[str]) -> WorkerSession | None:
        up = [w.session for w in workers if w.session.ready]
        good = [s for s in up if s.record.worker_id not in failed]
        return next(iter(good or up), None)


@dataclass
class Observed:
    """A RequestObserver that remembers."""

    retries: list[ErrorKind] = field(default_factory=list)
    num_moves: int = 0
    records: list[RequestRecord] = field(default_factory=list)

    def on_retry(self, reason: ErrorKind) -> None:
        self.retries.append(reason)

    def on_move(self) -> None:
        self.num_moves += 1

    def on_end(self, record: RequestRecord) -> None:
        self.records.append(record)


def make_spec(max_tokens: int = 4, *, stop_token_ids: tuple[int, ...] = (), timeout_s: float = 60.0) -> GenerationSpec:
    return GenerationSpec(
        request_id="r",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=max_tokens, seed=7, stop_token_ids=stop_token_ids),
        stop=(),
        hash_seed=b"h" * 16,
        packed_hashes=b"b" * 16,
        received_at=time.monotonic(),
        timeout_s=timeout_s,
    )


@dataclass
class PlayedLeases:
    """Quotas that grant everything and remember who holds and who gave back."""

    held: set[str] = field(default_factory=set)
    released: list[tuple[str, int]] = field(default_factory=list)

    def hold(self, lease_id: str) -> None:
        self.held.add(lease_id)

    def release(self, lease_id: str, num_output_tokens: int) -> None:
        self.held.discard(lease_id)
        self.released.append((lease_id, num_output_tokens))


def make_admission(max_requests: int) -> Admission:
    """Of a fleet so large that nothing ever waits."""
    capacity = Capacity(1000, 1000, 1 << 20)
    return Admission(Targets(1.0, 1.0), max_requests, lambda: capacity, lambda: (0.0, 0), time.monotonic)


class Bench:
    """A dispatcher over played workers: p0, p1, … and d0, d1, …"""

    def __init__(self, num_prefill: int = 1, num_decode: int = 1, max_in_flight: int = 10) -> None:
        self.prefills = [PlayedWorker(f"p{i}", "prefill") for i in range(num_prefill)]
        self.decodes = [PlayedWorker(f"d{i}", "decode") for i in range(num_decode)]
        self.observed = Observed()
        self.placer = PlayedPlacer(self.prefills, self.decodes)
        self.leases = PlayedLeases()
        self.admission = make_admission(max_in_flight)
        self.dispatcher = Dispatcher(self.placer, self.observed, self.admission, "t", time.monotonic, self.leases)

    @property
    def workers(self) -> list[PlayedWorker]:
        return [*self.prefills, *self.decodes]

    def all_idle(self) -> bool:
        return all(w.is_idle for w in self.workers) and self.dispatcher.num_in_flight == 0


async def settle() -> None:
    """Let tasks that are ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Turns the loop until `condition()` holds; for what needs no more than a few turns."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")
