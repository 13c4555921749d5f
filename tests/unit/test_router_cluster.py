"""What the router knows of its workers: registry records, sessions' load, and who of them may be used."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.worker.v1 import worker_pb2
from common.errors import BatonError, ErrorKind
from common.registry import encode_record, worker_key, workers_key
from common.rpc.worker_convert import source_from_proto
from common.rpc.worker_messages import PullSource, SequenceSpec, TransferTarget, WorkerIdentity
from common.sampling_params import SamplingParams
from router.cluster import fleet as fleet_module
from router.cluster.fleet import Fleet
from router.cluster.prefix_index import PAUSE_AFTER_FAILURE_S, CachedPrefix, PrefixIndex
from router.cluster.registry import ModelIdentity, RegistryWatcher
from router.cluster.subscriptions import SubscriptionTable
from router.cluster.worker_session import REPORT_LIFETIME_S, SessionState, WorkerSession
from tests.fakes.router_parts import PlayedWorker, make_record


class FakeRedis:
    """Sets and strings, and an outage on demand."""

    def __init__(self) -> None:
        self.members: set[bytes] = set()
        self.values: dict[str, bytes] = {}
        self.down = False

    def put(self, record) -> None:
        self.members.add(record.worker_id.encode())
        self.values[worker_key("c", record.worker_id)] = encode_record(record)

    def _answer(self, value):
        if self.down:
            raise RedisConnectionError("down")
        return value

    async def smembers(self, key: str):
        assert key == workers_key("c")
        return self._answer(set(self.members))

    async def mget(self, keys):
        return self._answer([self.values.get(key) for key in keys])

    async def srem(self, key: str, *members: str):
        self._answer(None)
        self.members -= {m.encode() for m in members}


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def seen() -> list:
    return []


@pytest.fixture
def watcher(redis, seen) -> RegistryWatcher:
    return RegistryWatcher(redis, "c", ModelIdentity("f", 16), lambda records: seen.append(dict(records)))


async def test_records_are_handed_over_and_a_failed_poll_hands_over_nothing(redis, watcher, seen):
    redis.put(make_record("p0", "prefill"))
    await watcher.poll()
    redis.down = True
    await watcher.poll()
    redis.down = False
    redis.put(make_record("d0", "decode"))
    await watcher.poll()
    assert [sorted(records) for records in seen] == [["p0"], ["d0", "p0"]]


async def test_foreign_and_malformed_records_are_skipped_and_told_once(redis, watcher, seen):
    redis.put(make_record("good", "decode"))
    redis.put(msgspec.structs.replace(make_record("other-model", "decode"), model_fingerprint="g"))
    redis.members |= {b"broken", b"not-json"}
    redis.values[worker_key("c", "broken")] = b'{"worker_id": 5}'
    redis.values[worker_key("c", "not-json")] = b"\xff"
    with structlog.testing.capture_logs() as logs:
        await watcher.poll()
        await watcher.poll()
    assert [sorted(records) for records in seen] == [["good"]] * 2
    assert sorted(entry["worker_id"] for entry in logs) == ["broken", "not-json", "other-model"]
    reason = next(entry["reason"] for entry in logs if entry["worker_id"] == "other-model")
    assert reason == "model_fingerprint: 'f' here, 'g' there"


async def test_ids_without_a_record_are_collected_after_a_while(redis, watcher, monkeypatch):
    redis.put(make_record("p0", "prefill"))
    redis.members.add(b"gone")
    await watcher.poll()
    assert b"gone" in redis.members, "it may only be late"
    monkeypatch.setattr("router.cluster.registry.FORGET_AFTER_S", -1.0)
    await watcher.poll()
    assert redis.members == {b"p0"}


class IdleSession(WorkerSession):
    """Is ready when the test says so; dials nobody."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    def connect(self) -> None:
        self._state = SessionState.READY
        self._on_change()


@asynccontextmanager
async def idle_fleet(monkeypatch):
    monkeypatch.setattr(fleet_module, "WorkerSession", IdleSession)
    fleet = Fleet("router", time.monotonic)
    try:
        yield fleet
    finally:
        await fleet.close()
        assert not fleet.sessions()


def records(*workers):
    return {record.worker_id: record for record in workers}


async def test_ready_first_needs_a_worker_of_each_role_that_exists(monkeypatch):
    async with idle_fleet(monkeypatch) as fleet:
        fleet.apply_records(records(make_record("d0", "decode"), make_record("p0", "prefill")))
        assert not fleet.ready, "registered is not connected"
        fleet.session("d0").connect()
        assert not fleet.ready, "a prefill worker exists and is not there yet"
        fleet.session("p0").connect()
        assert fleet.ready


async def test_once_ready_a_worker_that_registers_or_a_lost_prefill_worker_takes_nothing_back(monkeypatch):
    async with idle_fleet(monkeypatch) as fleet:
        decode, prefill = make_record("d0", "decode"), make_record("p0", "prefill")
        fleet.apply_records(records(decode))
        fleet.session("d0").connect()
        assert fleet.ready, "decode prefills for itself"
        fleet.apply_records(records(decode, prefill, make_record("d1", "decode")))
        assert fleet.ready, "more workers are no reason to turn requests away"
        fleet.session("p0").connect()
        fleet.session("p0")._lose()
        assert fleet.ready, "decode prefills for itself again"
        fleet.session("d0")._lose()
        assert not fleet.ready


async def test_a_draining_worker_takes_nothing_new(monkeypatch):
    async with idle_fleet(monkeypatch) as fleet:
        record = make_record("d0", "decode")
        fleet.apply_records(records(record))
        session = fleet.session("d0")
        session.connect()
        fleet.apply_records(records(msgspec.structs.replace(record, draining=True)))
        assert fleet.session("d0") is session, "and keeps its session for what runs"
        assert not fleet.usable("decode")
        assert not session.load().usable


async def test_a_connected_worker_outlives_its_record_and_an_unconnected_one_does_not(monkeypatch):
    async with idle_fleet(monkeypatch) as fleet:
        fleet.apply_records(records(make_record("d0", "decode"), make_record("p0", "prefill")))
        fleet.session("d0").connect()
        fleet.apply_records({})
        assert [s.record.worker_id for s in fleet.sessions()] == ["d0"]
        fleet.session("d0")._lose()
        fleet.apply_records({})
        assert fleet.sessions() == []


async def test_a_new_epoch_is_a_new_session_and_the_old_ones_requests_hear_of_it(monkeypatch):
    async with idle_fleet(monkeypatch) as fleet:
        fleet.apply_records(records(make_record("d0", "decode")))
        old = fleet.session("d0")
        old.connect()
        listener = Heard()
        old.subscribe("t1", listener)
        fleet.apply_records(records(make_record("d0", "decode", epoch="e2")))
        assert fleet.session("d0") is not old
        assert [error.kind for error in listener.lost] == [ErrorKind.LEASE_LOST]


async def test_waiters_are_woken_by_a_change(monkeypatch):
    async with idle_fleet(monkeypatch) as fleet:
        waiting = asyncio.create_task(fleet.wait_changed(60))
        await asyncio.sleep(0)
        fleet.apply_records(records(make_record("d0", "decode")))
        await asyncio.wait_for(waiting, 5)
        await fleet.wait_changed(0.0)


class Heard:
    """A LegListener that remembers."""

    def __init__(self) -> None:
        self.tokens: list = []
        self.news: list = []
        self.lost: list[BatonError] = []

    def on_reserved(self, target) -> None: ...

    def on_tokens(self, first_index, token_ids, logprobs=()) -> None:
        self.tokens += token_ids

    def on_news(self, news) -> None:
        self.news.append(news)

    def on_lost(self, error) -> None:
        self.lost.append(error)


def test_a_share_of_load_is_given_back_exactly_once_on_every_exit():
    table = SubscriptionTable()
    for transfer_id in "abcd":
        table.add(transfer_id, Heard(), prefill_tokens=10, blocks=2)
    assert (table.unanswered_prefill_tokens, table.unconfirmed_blocks) == (40, 8)
    for _ in range(2):
        table.answered("a")
        table.confirmed("a")
        table.remove("b")
    assert (table.unanswered_prefill_tokens, table.unconfirmed_blocks) == (20, 4)
    table.add("e", Heard(), prefill_tokens=10, blocks=2)
    table.confirmed("e")
    assert (table.unanswered_prefill_tokens, table.unconfirmed_blocks) == (30, 4)
    table.remove("e")
    table.remove("a")
    assert (table.unanswered_prefill_tokens, table.unconfirmed_blocks) == (20, 4)
    assert [transfer_id for transfer_id, _ in table.remove_all()] == ["c", "d"]
    table.remove("c")
    assert table.answered("c") is table.confirmed("c") is table.get("c") is None
    assert (len(table), table.unanswered_prefill_tokens, table.unconfirmed_blocks) == (0, 0, 0)
    table.add("x", Heard(), prefill_tokens=0, blocks=0)
    with pytest.raises(BatonError):
        table.add("x", Heard(), prefill_tokens=0, blocks=0)


def test_load_is_the_larger_of_report_and_own_account_and_old_reports_expire():
    now = [0.0]
    session = WorkerSession(make_record("p0", "prefill"), "router", lambda: None, lambda: now[0])
    session._state = SessionState.READY
    assert session.load().num_free_blocks == 100
    report = worker_pb2.LoadReport(
        num_running=3, num_waiting=2, num_free_blocks=40, num_blocks=100, queued_prefill_tokens=50
    )
    session._on_step(worker_pb2.StepOutput(load=report))
    session.subscribe("t", Heard(), prefill_tokens=30, blocks=5)
    load = session.load(num_cached_tokens=16)
    assert (load.num_running, load.queued_prefill_tokens, load.num_free_blocks) == (5, 50, 35)
    assert load.num_cached_tokens == 16
    session.subscribe("u", Heard(), prefill_tokens=70, blocks=0)
    assert session.load().queued_prefill_tokens == 100
    now[0] = REPORT_LIFETIME_S + 1
    load = session.load()
    assert (load.num_running, load.queued_prefill_tokens, load.num_free_blocks) == (2, 100, 95)


def test_a_lost_session_tells_everybody_once_and_forgets_what_late_frames_say():
    worker = PlayedWorker("d0", "decode")
    heard = [Heard(), Heard()]
    for index, listener in enumerate(heard):
        worker.session.subscribe(f"t{index}", listener, prefill_tokens=5, blocks=1)
    worker.lose()
    worker.lose()
    assert [len(listener.lost) for listener in heard] == [1, 1]
    assert worker.is_idle
    with pytest.raises(BatonError, match="not connected"):
        worker.session.subscribe("t9", Heard())
    worker.session.send_abort("t0")
    assert worker.commands == [], "nothing is kept for a session that may never come"
    worker.output("t0", first_index=0, token_ids=[1])
    worker.reserved("t0")
    assert worker.session.num_late_frames == 2
    assert heard[0].tokens == []


def stalled(session: WorkerSession, *, engine_stalled: bool) -> None:
    load = worker_pb2.LoadReport(num_free_blocks=9, num_blocks=9, engine_stalled=engine_stalled)
    session._on_step(worker_pb2.StepOutput(load=load))


def test_what_runs_where_the_engine_is_stuck_goes_on_elsewhere_and_the_mark_expires():
    worker, heard = PlayedWorker("d0", "decode"), Heard()
    session = worker.session
    session.subscribe("t", heard, prefill_tokens=5, blocks=1)
    for _ in range(2):
        stalled(session, engine_stalled=True)
    assert [error.kind for error in heard.lost] == [ErrorKind.LEASE_LOST]
    assert (session.state, session.accepting, session.load().usable) == (SessionState.SILENT, False, False)
    assert worker.pop_command().abort.transfer_id == "t", "when it moves again it must not go on with that"
    with pytest.raises(BatonError, match="fallen silent"):
        session.subscribe("u", Heard())
    stalled(session, engine_stalled=False)
    assert session.accepting
    session.subscribe("u", Heard())
    worker.lose()
    assert session.num_events == {"connected": 0, "silent": 1, "lost": 1}


def test_a_worker_that_says_that_it_drains_gets_nothing_new_and_keeps_what_it_has():
    worker, heard = PlayedWorker("d0", "decode"), Heard()
    worker.session.subscribe("t", heard)
    worker.session._on_step(worker_pb2.StepOutput(load=worker_pb2.LoadReport(draining=True)))
    assert worker.session.ready
    assert not worker.session.accepting
    worker.output("t", first_index=0, token_ids=[1])
    assert (heard.tokens, heard.lost) == ([1], [])


def test_a_prefill_command_says_whom_to_pull_from():
    worker = PlayedWorker("p0", "prefill")
    spec = SequenceSpec("t", "r", [1, 2], 2, b"h" * 16, SamplingParams(max_tokens=1), deadline=time.monotonic() + 5)
    identity = WorkerIdentity("d0", "e1")
    source = PullSource("there:1", WorkerIdentity("p1", "e9"), b"s" * 16, 480)
    worker.session.send_prefill(spec, TransferTarget("there:2", identity, b"x" * 16, 0), (source,))
    sources = worker.pop_command().prefill.pull_sources
    assert [source_from_proto(each) for each in sources] == [source]


def test_one_requests_bug_does_not_end_the_session_of_others():
    class Broken(Heard):
        def on_tokens(self, first_index, token_ids, logprobs=()) -> None:
            raise RuntimeError("bug")

    worker = PlayedWorker("d0", "decode")
    broken, fine = Broken(), Heard()
    worker.session.subscribe("b", broken, prefill_tokens=5)
    worker.session.subscribe("f", fine, prefill_tokens=5)
    worker.output("b", first_index=0, token_ids=[1])
    worker.output("f", first_index=0, token_ids=[1], finish_reason="STOP", leg_ended=True)
    assert [error.kind for error in broken.lost] == [ErrorKind.INTERNAL]
    assert (fine.tokens, len(fine.news)) == ([1], 1)
    assert worker.is_idle


async def test_the_index_gives_no_answer_while_redis_is_away_and_asks_again_later():
    class Counting:
        calls = 0

        async def evalsha(self, *arguments):
            self.calls += 1
            raise RedisConnectionError("down")

    now, redis = [0.0], Counting()
    index = PrefixIndex(redis, "c", lambda: now[0])
    workers = [make_record("p0", "prefill"), make_record("d0", "decode")]
    assert await index.lookup(workers, b"h" * 16) is None
    assert await index.lookup(workers, b"h" * 16) is None
    assert redis.calls == 1, "one request waits for a dead Redis, not each"
    now[0] = PAUSE_AFTER_FAILURE_S
    await index.lookup(workers, b"h" * 16)
    assert redis.calls == 2
    assert await index.lookup(workers, b"") == [CachedPrefix(0, 0)] * 2
    assert await index.lookup([], b"h" * 16) == []


async def test_the_index_never_holds_a_request_up_for_long():
    class Silent:
        async def evalsha(self, *arguments):
            await asyncio.Event().wait()

    index = PrefixIndex(Silent(), "c", time.monotonic, timeout_s=0.0)
    assert await index.lookup([make_record("d0", "decode")], b"h" * 16) is None
