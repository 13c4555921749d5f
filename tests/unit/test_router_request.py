"""A request's life, with its workers played frame by frame: what comes out is exact, and nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.v1 import common_pb2
from baton.worker.v1.worker_pb2 import SequenceSpec
from common.errors import BatonError, ErrorKind
from common.sampling_params import FinishReason, choice_seed
from router import request as request_module
from router.cluster.worker_session import SessionState
from router.policy.suspicion import MAX_ATTEMPTS, PROVEN_TOKENS
from router.request_state import LEGAL_MOVES, TERMINAL, IllegalMoveError, RequestState, check_move
from router.spec import Finished, Usage
from tests.fakes.router_parts import PROMPT, Bench, PlayedWorker, make_spec, settle, until


@pytest.fixture
def bench() -> Bench:
    return Bench()


class Client:
    """Takes whatever it is notified of."""

    def __init__(self, bench: Bench, spec=None) -> None:
        self.tokens: list[int] = []
        self.ends: list[object] = []
        self.run = bench.dispatcher.submit(spec or make_spec(), self.notified)

    def notified(self) -> None:
        delta = self.run.take()
        self.tokens += delta.token_ids
        if delta.end is not None:
            self.ends.append(delta.end)

    @property
    def end(self):
        assert len(self.ends) == 1, "exactly one end"
        return self.ends[0]


async def started(bench: Bench, spec=None) -> tuple[Client, str]:
    """A request whose reservation was asked for; its transfer_id."""
    client = Client(bench, spec)
    await settle()
    return client, bench.decodes[0].commands[-1].reserve.spec.transfer_id


async def test_a_plain_request_passes_both_workers_and_ends_once(bench):
    client, transfer_id = await started(bench)
    p0, d0 = bench.prefills[0], bench.decodes[0]
    reserve = d0.pop_command().reserve
    assert (list(reserve.spec.token_ids), reserve.spec.num_prompt_tokens) == (PROMPT, len(PROMPT))
    assert not reserve.prefill_here
    assert reserve.spec.priority == 0
    assert 0 < reserve.spec.timeout_ms <= 60_000
    assert p0.commands == []
    d0.reserved(transfer_id)
    prefill = p0.pop_command().prefill
    assert prefill.target.address == "there:1"
    assert prefill.spec.transfer_id == transfer_id
    p0.output(transfer_id, first_index=0, token_ids=[50])
    assert client.run.state is RequestState.DECODING
    p0.output(transfer_id, leg_ended=True, num_cached_tokens=16)
    d0.output(transfer_id, first_index=1, token_ids=[51, 52])
    d0.output(transfer_id, first_index=3, token_ids=[53], finish_reason="LENGTH", leg_ended=True)
    assert client.tokens == [50, 51, 52, 53]
    assert client.end == Finished(FinishReason.LENGTH, Usage(len(PROMPT), 4, 16))
    assert bench.all_idle()
    assert p0.commands == d0.commands == [], "nobody is told to abort what ended well"
    assert [r.outcome for r in bench.observed.records] == ["length"]


async def test_decode_may_speak_before_the_first_token(bench):
    client, transfer_id = await started(bench)
    bench.decodes[0].reserved(transfer_id)
    bench.decodes[0].output(transfer_id, first_index=1, token_ids=[51, 52, 53], finish_reason="LENGTH", leg_ended=True)
    assert client.tokens == []
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50])
    assert client.tokens == [50, 51, 52, 53]
    assert client.ends == [], "usage is known when the prefill leg has ended"
    bench.prefills[0].output(transfer_id, leg_ended=True, num_cached_tokens=16)
    assert client.end.usage.cached_tokens == 16
    assert bench.all_idle()


async def test_a_first_token_that_ends_the_request_waits_for_no_transfer(bench):
    client, transfer_id = await started(bench, make_spec(4, stop_token_ids=(50,)))
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50], finish_reason="STOP", num_cached_tokens=16)
    assert client.tokens == [50]
    assert client.end == Finished(FinishReason.STOP, Usage(len(PROMPT), 1, 16)), "the end-of-sequence token counts"
    assert bench.all_idle()
    assert bench.decodes[0].commands_of("abort") == [], "its blocks are still to be cached"
    bench.decodes[0].output(transfer_id, finish_reason="STOP", leg_ended=True)
    bench.prefills[0].output(transfer_id, leg_ended=True)
    assert [w.session.num_late_frames for w in bench.workers] == [1, 1]


async def test_nobody_waits_long_for_a_last_frame_that_only_brings_usage(bench, monkeypatch):
    monkeypatch.setattr(request_module, "LEG_END_WAIT_S", 0.0)
    client, transfer_id = await started(bench, make_spec(2))
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50])
    bench.decodes[0].output(transfer_id, first_index=1, token_ids=[51], finish_reason="LENGTH", leg_ended=True)
    assert client.ends == []
    await until(lambda: client.ends)
    assert client.end.reason is FinishReason.LENGTH
    assert bench.all_idle()


async def test_without_prefill_workers_the_decode_worker_does_it_all():
    bench = Bench(num_prefill=0)
    client, transfer_id = await started(bench)
    d0 = bench.decodes[0]
    assert d0.pop_command().reserve.prefill_here
    assert d0.session.load().queued_prefill_tokens == len(PROMPT)
    d0.output(transfer_id, first_index=0, token_ids=[50, 51, 52])
    assert d0.session.load().queued_prefill_tokens == 0
    d0.output(transfer_id, first_index=3, token_ids=[53], finish_reason="LENGTH", leg_ended=True, num_cached_tokens=16)
    assert client.tokens == [50, 51, 52, 53]
    assert client.end.usage == Usage(len(PROMPT), 4, 16)
    assert bench.all_idle()


@pytest.mark.parametrize("moment", ["queued", "reserving", "prefilling", "decoding"])
async def test_an_abort_reaches_every_worker_at_once_and_leaves_nothing(bench, moment):
    client = Client(bench)
    p0, d0 = bench.prefills[0], bench.decodes[0]
    if moment != "queued":
        await settle()
        transfer_id = d0.commands[-1].reserve.spec.transfer_id
    if moment in ("prefilling", "decoding"):
        d0.reserved(transfer_id)
    if moment == "decoding":
        p0.output(transfer_id, first_index=0, token_ids=[50])
    client.run.abort()
    client.run.abort()
    assert client.end.kind is ErrorKind.CANCELLED
    assert bench.all_idle()
    await settle()
    if moment != "queued":
        assert [c.abort.transfer_id for c in d0.commands_of("abort")] == [transfer_id]
        assert [c.abort.transfer_id for c in p0.commands_of("abort")] == [transfer_id]
        d0.output(transfer_id, first_index=1, token_ids=[51])
        p0.output(transfer_id, leg_ended=True)
    assert d0.commands_of("reserve") == [] or moment != "queued"
    assert client.tokens == ([50] if moment == "decoding" else [])
    assert [r.outcome for r in bench.observed.records] == ["abort"]


@pytest.mark.parametrize(
    ("victim", "emitted"), [("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1), ("decode", 2)]
)
async def test_a_lost_worker_costs_no_token_and_repeats_none(victim, emitted):
    bench = Bench(2, 2)
    client, old_id = await started(bench)
    bench.decodes[0].reserved(old_id)
    if emitted >= 1:
        bench.prefills[0].output(old_id, first_index=0, token_ids=[50])
    if emitted >= 2:
        bench.decodes[0].output(old_id, first_index=1, token_ids=[51])
    lost, kept = (bench.prefills, bench.decodes) if victim == "prefill" else (bench.decodes, bench.prefills)
    lost[0].lose()
    assert [c.abort.transfer_id for c in kept[0].commands_of("abort")] == [old_id]
    await settle()
    heir_d = bench.decodes[1] if victim == "decode" else bench.decodes[0]
    heir_p = bench.prefills[1] if victim == "prefill" else bench.prefills[0]
    spec = heir_d.commands_of("reserve")[-1].reserve.spec
    assert spec.transfer_id != old_id
    assert list(spec.token_ids) == PROMPT + [50, 51][:emitted]
    assert spec.num_prompt_tokens == len(PROMPT)
    assert spec.sampling.max_tokens == 4
    heir_d.reserved(spec.transfer_id)
    kept[0].output(old_id, first_index=emitted, token_ids=[99])  # a late frame of the first attempt
    tokens = [50, 51, 52, 53]
    heir_p.output(spec.transfer_id, first_index=emitted, token_ids=[tokens[emitted]])
    heir_p.output(spec.transfer_id, leg_ended=True)
    rest = tokens[emitted + 1 :]
    heir_d.output(spec.transfer_id, first_index=emitted + 1, token_ids=rest, finish_reason="LENGTH", leg_ended=True)
    assert client.tokens == tokens
    assert client.end.usage.completion_tokens == 4
    assert bench.observed.retries == [ErrorKind.LEASE_LOST]
    assert bench.all_idle()


async def test_a_worker_that_dies_with_the_last_token_out_costs_nothing(bench):
    client, transfer_id = await started(bench, make_spec(2))
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50])
    bench.decodes[0].output(transfer_id, first_index=1, token_ids=[51])  # its finish reason never comes
    bench.decodes[0].lose()
    assert client.end.reason is FinishReason.LENGTH
    assert bench.all_idle()


async def test_a_failed_transfer_after_the_last_token_is_no_failure(bench):
    client, transfer_id = await started(bench, make_spec(1))
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50], finish_reason="LENGTH")
    bench.prefills[0].output(transfer_id, error="LEASE_LOST")
    assert client.end.reason is FinishReason.LENGTH


async def test_attempts_are_bounded_and_the_client_learns_no_inner_kind(monkeypatch):
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench = Bench()
    client = Client(bench)
    for _ in range(MAX_ATTEMPTS):
        await until(lambda: bench.decodes[0].commands_of("reserve"))
        transfer_id = bench.decodes[0].commands_of("reserve")[0].reserve.spec.transfer_id
        bench.decodes[0].session._outbox.clear()
        bench.decodes[0].output(transfer_id, error="CORRUPT_KV")
    assert client.end.kind is ErrorKind.NO_WORKER
    assert client.end.retry_after_s
    assert bench.observed.retries == [ErrorKind.CORRUPT_KV] * (MAX_ATTEMPTS - 1)
    assert [r.outcome for r in bench.observed.records] == ["no_worker"]
    assert bench.all_idle()


@pytest.mark.parametrize("kind", ["INVALID_REQUEST", "CONTEXT_LENGTH", "INTERNAL", "OVERLOADED", "DEADLINE_EXCEEDED"])
async def test_what_another_worker_would_not_cure_is_not_retried(bench, kind):
    client, transfer_id = await started(bench)
    bench.decodes[0].output(transfer_id, error=kind)
    assert client.end.kind is ErrorKind[kind]
    assert bench.observed.retries == []
    assert bench.all_idle()


async def test_a_leg_that_ends_without_its_end_is_tried_again():
    bench = Bench(2, 2)
    client, transfer_id = await started(bench)
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, leg_ended=True)  # and no first token
    await settle()
    assert bench.observed.retries == [ErrorKind.LEASE_LOST]
    assert client.ends == []
    client.run.abort()


async def test_the_deadline_ends_a_request_in_any_state(bench):
    client = Client(bench, make_spec(timeout_s=1e-9))
    await until(lambda: client.ends)
    assert client.end.kind is ErrorKind.DEADLINE_EXCEEDED
    assert bench.all_idle()


async def test_a_stop_string_ends_both_legs_and_counts_only_what_was_used(bench):
    client, transfer_id = await started(bench, make_spec(100))
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50])
    bench.decodes[0].output(transfer_id, first_index=1, token_ids=[51, 52, 53])
    usage = client.run.stop(2)
    assert usage.completion_tokens == 2
    assert client.run.state is RequestState.FINISHED
    assert bench.decodes[0].commands_of("abort")
    assert bench.prefills[0].commands_of("abort")
    assert [(r.outcome, r.usage.completion_tokens) for r in bench.observed.records] == [("stop", 2)]
    assert bench.all_idle()


async def test_no_worker_at_all_is_an_error_at_once():
    bench = Bench(0, 0)
    client = Client(bench)
    await settle()
    assert client.end.kind is ErrorKind.NO_WORKER


async def test_a_placement_that_outlives_its_cancellation_starts_nothing(bench):
    """As asyncio.wait_for on Python 3.11 may: it returns its result although it was cancelled."""
    place = bench.placer.place

    async def stubborn(*arguments, **options):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await place(*arguments, **options)

    bench.placer.place = stubborn
    client = Client(bench)
    await settle()
    client.run.abort()
    await settle()
    assert client.end.kind is ErrorKind.CANCELLED
    assert bench.all_idle()
    assert bench.decodes[0].commands == []


async def test_the_number_in_flight_is_bounded_and_recovers():
    bench = Bench(max_in_flight=2)
    first, second = Client(bench), Client(bench)
    with pytest.raises(BatonError) as caught:
        bench.dispatcher.submit(make_spec(), lambda: None)
    assert (caught.value.kind, caught.value.retry_after_s) == (ErrorKind.OVERLOADED, 1.0)
    assert (bench.dispatcher.num_waiting, bench.dispatcher.num_running) == (2, 0)
    first.run.abort()
    third = Client(bench)
    for client in (second, third):
        client.run.abort()
    assert bench.all_idle()


async def test_shutdown_refuses_new_requests_and_fails_what_runs(bench):
    client, _ = await started(bench)
    draining = BatonError(ErrorKind.DRAINING, "down")
    bench.dispatcher.refuse_new(draining)
    with pytest.raises(BatonError):
        bench.dispatcher.submit(make_spec(), lambda: None)
    assert client.ends == []
    bench.dispatcher.fail_all(draining)
    assert client.end is draining
    assert await bench.dispatcher.wait_empty(1.0)
    assert bench.all_idle()


async def test_transfer_ids_are_never_used_twice():
    bench = Bench(2, 2)
    ids = set()
    for _ in range(20):
        client, transfer_id = await started(bench)
        ids.add(transfer_id)
        client.run.abort()
    assert len(ids) == 20


def test_terminal_states_have_no_way_out_and_every_state_has_a_way_to_each_end():
    for state in RequestState:
        assert (LEGAL_MOVES[state] == frozenset()) == (state in TERMINAL)
        assert state in TERMINAL or LEGAL_MOVES[state] >= TERMINAL
    with pytest.raises(IllegalMoveError):
        check_move(RequestState.FINISHED, RequestState.QUEUED)


class _Story:
    """Random but legal workers: every attempt emits the scripted tokens from where it was told to begin."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.bench = Bench(2, 2)
        self.total = self.draw(st.integers(1, 6), label="max_tokens")
        self.tokens = [50 + i for i in range(self.total)]
        self.client = Client(self.bench, make_spec(self.total))
        # transfer_id → frames that its workers will still send, in the order of each leg.
        self.legs: dict[tuple[str, str], list[dict]] = {}

    async def step(self) -> None:
        """One worker takes its commands, or sends its next frame, or fails."""
        for worker in self.bench.workers:
            while worker.commands:
                self._command(worker, worker.pop_command())
        choices = sorted(key for key, frames in self.legs.items() if frames)
        if not choices:
            return
        key = self.draw(st.sampled_from(choices))
        worker = next(w for w in self.bench.workers if w.session.record.worker_id == key[0])
        fate = self.draw(st.sampled_from(["frame"] * 8 + ["lose", "error"]))
        if fate == "lose":
            worker.lose()
            self.legs = {k: v for k, v in self.legs.items() if k[0] != key[0]}
            worker.session._state = worker.session._state.__class__.READY  # reconnected at once
        elif fate == "error":
            self.legs.pop(key)
            worker.output(key[1], error=self.draw(st.sampled_from(["LEASE_LOST", "DRAINING", "CORRUPT_KV"])))
        else:
            frame = self.legs[key].pop(0)
            if frame.get("reserved"):
                worker.reserved(key[1])
            else:
                worker.output(key[1], **frame)

    def _command(self, worker, command) -> None:
        worker_id, kind = worker.session.record.worker_id, command.WhichOneof("frame")
        if kind == "abort":
            self.legs.pop((worker_id, command.abort.transfer_id), None)
            return
        spec = command.reserve.spec if kind == "reserve" else command.prefill.spec
        base = len(spec.token_ids) - spec.num_prompt_tokens
        assert list(spec.token_ids[spec.num_prompt_tokens :]) == self.tokens[:base]
        assert base < self.total, "nothing is left to do"
        key = (worker_id, spec.transfer_id)
        last = base + 1 == self.total
        if kind == "prefill":
            ending = {"finish_reason": "LENGTH"} if last else {}
            first = {"first_index": base, "token_ids": self.tokens[base : base + 1], **ending}
            self.legs[key] = [first, {"leg_ended": True, "num_cached_tokens": 16}]
            return
        frames: list[dict] = [{"reserved": True}]
        for i in range(base + 1, self.total):
            frame = {"first_index": i, "token_ids": [self.tokens[i]]}
            frames.append(frame | ({"finish_reason": "LENGTH", "leg_ended": True} if i + 1 == self.total else {}))
        if last:
            frames.append({"finish_reason": "LENGTH", "leg_ended": True})
        self.legs[key] = frames


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_fails_the_output_is_a_prefix_of_the_truth_and_everything_is_given_back(data):
    async def story() -> None:
        play = _Story(data)
        abort_after = data.draw(st.none() | st.integers(0, 10), label="abort after")
        for step in range(60):
            await settle()
            if step == abort_after:
                play.client.run.abort()
            if play.client.ends:
                break
            await play.step()
        play.client.run.abort()
        client = play.client
        assert client.tokens == play.tokens[: len(client.tokens)]
        hypothesis.event(f"{type(client.end).__name__} {len(play.bench.observed.retries)}")
        if isinstance(client.end, Finished):
            assert client.tokens == play.tokens
            assert client.end.usage.completion_tokens == play.total
        assert play.bench.all_idle()
        assert len(play.bench.observed.records) == 1
        await settle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
        asyncio.run(story())


async def test_a_request_that_draining_workers_hand_back_goes_on_elsewhere_and_that_is_no_failure(monkeypatch):
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench = Bench(num_decode=2)
    client, transfer_id = await started(bench, make_spec(50))
    for turn in range(request_module.MAX_HAND_BACKS):
        here, there = bench.decodes[turn % 2], bench.decodes[1 - turn % 2]
        emitted = len(client.tokens)
        here.reserved(transfer_id)
        bench.prefills[0].output(transfer_id, first_index=emitted, token_ids=[50 + emitted])
        here.output(transfer_id, error="DRAINING")
        await settle()
        spec = there.commands_of("reserve")[-1].reserve.spec
        assert list(spec.token_ids) == PROMPT + client.tokens
        transfer_id = spec.transfer_id
    assert client.tokens == [50 + i for i in range(request_module.MAX_HAND_BACKS)]
    assert (bench.observed.retries, client.ends) == ([], [])


async def reserved(bench: Bench, transfer_ids: set[str]) -> list[tuple[PlayedWorker, SequenceSpec]]:
    """Where requests were newly reserved, and what was asked for; transfer_ids: those known, and from now on these."""
    await settle()
    found = []
    for worker in bench.decodes:
        for command in worker.commands_of("reserve"):
            spec = command.reserve.spec
            if spec.transfer_id not in transfer_ids:
                transfer_ids.add(spec.transfer_id)
                found.append((worker, spec))
    return found


async def test_a_prompt_that_kills_workers_fails_after_two_and_no_peer_with_it(monkeypatch):
    """Three prompts are being computed and a stream flows when the poison strikes."""
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench, seen = Bench(num_prefill=0, num_decode=1), set()
    d0 = bench.decodes[0]
    clients = [Client(bench, make_spec(40)) for _ in range(4)]
    specs = [spec for _, spec in await reserved(bench, seen)]
    flowing, poison = clients[0], clients[2]
    d0.output(specs[0].transfer_id, first_index=0, token_ids=[50, 51])
    num_deaths = 0
    for _ in range(20):
        # Whatever runs with the poison kills the worker, which comes back; without it, it flows.
        if num_deaths == 0 or d0.session._subscriptions.get(poison.run._facts.attempt.transfer_id):
            num_deaths += 1
            d0.lose()
            d0.session._state = SessionState.READY
        for _, spec in await reserved(bench, seen):
            if spec.transfer_id != poison.run._facts.attempt.transfer_id:
                base = len(spec.token_ids) - spec.num_prompt_tokens
                tokens = [50 + i for i in range(base, 40)]
                d0.output(spec.transfer_id, first_index=base, token_ids=tokens, finish_reason="LENGTH", leg_ended=True)
    assert num_deaths == 2
    assert poison.end.kind is ErrorKind.INTERNAL
    assert all(client.tokens == [50 + i for i in range(40)] for client in clients if client is not poison)
    assert flowing.end.usage.completion_tokens == 40
    assert bench.all_idle()


async def test_suspects_are_never_at_workers_together(monkeypatch):
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench, seen = Bench(num_prefill=0, num_decode=2), set()
    clients = [Client(bench, make_spec(40)) for _ in range(5)]
    await reserved(bench, seen)
    bench.decodes[0].lose()
    clients[4].run.abort()  # while it waits for its turn
    for _ in range(4):
        ((worker, spec),) = await reserved(bench, seen)
        worker.output(spec.transfer_id, first_index=0, token_ids=list(range(50, 50 + PROVEN_TOKENS)))
    assert not await reserved(bench, seen)
    for client in clients:
        client.run.abort()
    assert bench.all_idle()
    assert len(bench.dispatcher._trials) == 0


async def test_a_worker_that_only_fell_silent_convicts_nobody(monkeypatch):
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench, seen = Bench(num_prefill=0, num_decode=2), set()
    client = Client(bench)
    for _ in range(2):
        ((worker, _),) = await reserved(bench, seen)
        worker.session._fall_silent("a busy machine")
        worker.session._state = SessionState.READY
    ((worker, spec),) = await reserved(bench, seen)
    worker.output(spec.transfer_id, first_index=0, token_ids=[50, 51, 52, 53], finish_reason="LENGTH", leg_ended=True)
    assert client.end.reason is FinishReason.LENGTH


async def test_choices_of_a_prompt_that_kills_fail_together(monkeypatch):
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench = Bench(num_prefill=0, num_decode=1)
    choices = Choices(bench)
    for _ in range(2):
        await settle()
        bench.decodes[0].lose()
        bench.decodes[0].session._state = SessionState.READY
    await settle()
    assert [end.kind for (end,) in choices.ends] == [ErrorKind.INTERNAL] * 3
    assert bench.all_idle()


async def test_a_stream_that_gets_on_survives_any_number_of_deaths(monkeypatch):
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench, seen = Bench(num_prefill=0, num_decode=2), set()
    client = Client(bench, make_spec(100))
    for _ in range(2 * MAX_ATTEMPTS):
        ((worker, spec),) = await reserved(bench, seen)
        base = len(spec.token_ids) - spec.num_prompt_tokens
        worker.output(spec.transfer_id, first_index=base, token_ids=[50 + base + i for i in range(PROVEN_TOKENS)])
        worker.lose()
        worker.session._state = SessionState.READY
    assert client.tokens == [50 + i for i in range(2 * MAX_ATTEMPTS * PROVEN_TOKENS)]
    client.run.abort()


async def test_a_deadline_that_passes_while_no_worker_is_there_says_so():
    bench = Bench(0, 1)
    bench.decodes[0].lose()

    async def wait_for_ever(*arguments, **options):
        await asyncio.Event().wait()

    bench.placer.place = wait_for_ever
    client = Client(bench, make_spec(timeout_s=0.01))
    await until(lambda: client.ends)
    assert client.end.kind is ErrorKind.NO_WORKER


async def test_a_preempted_request_moves_to_where_there_is_room_and_that_is_no_failure(monkeypatch):
    """Back and forth, as often as allowed; then it stays. Its attempts are all still there."""
    monkeypatch.setattr(request_module, "RETRY_PAUSE_S", 0.0)
    bench = Bench(num_decode=2)
    client, transfer_id = await started(bench, make_spec(50))
    bench.decodes[0].reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50])
    for move in range(request_module.MAX_MOVES + 1):
        here, there = bench.decodes[move % 2], bench.decodes[1 - move % 2]
        emitted = len(client.tokens)
        here.output(transfer_id, first_index=emitted, token_ids=[50 + emitted])
        here.output(transfer_id, first_index=emitted + 1, num_wanted_blocks=7)
        await settle()
        aborted = [c.abort.transfer_id for c in here.commands_of("abort")]
        assert (transfer_id in aborted) == (move < request_module.MAX_MOVES)
        if transfer_id in aborted:
            spec = there.commands_of("reserve")[-1].reserve.spec
            assert (list(spec.token_ids), spec.num_prompt_tokens) == (PROMPT + client.tokens, len(PROMPT))
            transfer_id = spec.transfer_id
            there.reserved(transfer_id)
            emitted = len(client.tokens)
            bench.prefills[0].output(transfer_id, first_index=emitted, token_ids=[50 + emitted])
    assert client.tokens == [50 + i for i in range(len(client.tokens))]
    assert (bench.observed.retries, bench.observed.num_moves) == ([], request_module.MAX_MOVES)
    seen = {c.reserve.spec.transfer_id for d in bench.decodes for c in d.commands_of("reserve")}
    for _ in range(MAX_ATTEMPTS):
        assert client.ends == []
        for decode in bench.decodes:
            decode.output(transfer_id, error="LEASE_LOST")
        await settle()
        new = {c.reserve.spec.transfer_id for d in bench.decodes for c in d.commands_of("reserve")} - seen
        transfer_id = next(iter(new), "")
        seen |= new
    assert client.end.kind is ErrorKind.NO_WORKER


async def test_a_preempted_request_stays_where_nobody_else_has_room():
    bench = Bench(num_decode=1)
    client, transfer_id = await started(bench, make_spec(5))
    d0 = bench.decodes[0]
    d0.reserved(transfer_id)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50])
    d0.output(transfer_id, first_index=1, num_wanted_blocks=7)
    await settle()
    assert d0.commands_of("abort") == []
    d0.output(transfer_id, first_index=1, token_ids=[51, 52, 53, 54], finish_reason="LENGTH", leg_ended=True)
    assert client.tokens == [50, 51, 52, 53, 54]


# ---- several continuations of one prompt


class Choices:
    """A request with n = 3, before its workers."""

    def __init__(self, bench: Bench) -> None:
        self.tokens: list[list[int]] = [[], [], []]
        self.ends: list[list[object]] = [[], [], []]
        spec = replace(make_spec(), num_choices=3)
        self.runs = bench.dispatcher.submit_choices(spec, [partial(self.notified, i) for i in range(3)])

    def notified(self, index: int) -> None:
        delta = self.runs[index].take()
        self.tokens[index] += delta.token_ids
        if delta.end is not None:
            self.ends[index].append(delta.end)


async def choices_sent(bench: Bench) -> tuple[Choices, list[str]]:
    """Three continuations whose one reservation was granted; their transfer ids."""
    choices = Choices(bench)
    await settle()
    spec = bench.decodes[0].pop_command().reserve.spec
    assert bench.decodes[0].commands == [], "one reservation for all"
    bench.decodes[0].reserved(spec.transfer_id)
    prefill = bench.prefills[0].pop_command().prefill.spec
    assert bench.prefills[0].commands == [], "one prefill for all"
    assert prefill.forks == spec.forks
    assert [f.seed for f in spec.forks] == [choice_seed(7, 1), choice_seed(7, 2)]
    return choices, [spec.transfer_id, *(fork.transfer_id for fork in spec.forks)]


async def test_choices_are_sent_once_and_end_each_by_itself(bench):
    choices, ids = await choices_sent(bench)
    assert len(set(ids)) == 3
    for index, transfer_id in enumerate(ids):
        bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50 + index], num_cached_tokens=16)
        bench.prefills[0].output(transfer_id, leg_ended=True, num_cached_tokens=16)
        bench.decodes[0].output(
            transfer_id, first_index=1, token_ids=[60, 61, 70 + index], finish_reason="LENGTH", leg_ended=True
        )
    assert choices.tokens == [[50, 60, 61, 70], [51, 60, 61, 71], [52, 60, 61, 72]]
    usages = [end.usage for (end,) in choices.ends]
    assert usages == [Usage(len(PROMPT), 4, 16), Usage(0, 4, 0), Usage(0, 4, 0)], "the prompt counts once"
    assert bench.all_idle()


async def test_a_worker_that_dies_has_each_choice_go_on_by_itself_with_its_own_seed():
    bench = Bench(num_decode=2)
    choices, ids = await choices_sent(bench)
    for index, transfer_id in enumerate(ids):
        bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50 + index])
    bench.decodes[0].output(ids[1], first_index=1, token_ids=[60])
    bench.decodes[0].lose()
    await settle()
    specs = [command.reserve.spec for command in bench.decodes[1].commands_of("reserve")]
    assert [list(spec.token_ids[len(PROMPT) :]) for spec in specs] == [[50], [51, 60], [52]]
    assert [spec.sampling.seed for spec in specs] == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert all(len(spec.forks) == 0 for spec in specs)
    for run in choices.runs:
        run.abort()
    assert bench.all_idle()


async def test_one_choice_that_stops_leaves_the_others_running(bench):
    choices, ids = await choices_sent(bench)
    bench.prefills[0].output(ids[0], first_index=0, token_ids=[50])
    choices.runs[0].stop(1)
    assert [c.abort.transfer_id for c in bench.decodes[0].commands_of("abort")] == [ids[0]]
    for transfer_id in ids[1:]:
        bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50], finish_reason="STOP")
    assert [len(ends) for ends in choices.ends] == [1, 1, 1]
    assert bench.all_idle()


async def test_choices_that_find_no_worker_all_end_with_the_error():
    bench = Bench(num_prefill=0, num_decode=0)
    choices = Choices(bench)
    await until(lambda: all(choices.ends))
    assert [end.kind for (end,) in choices.ends] == [ErrorKind.NO_WORKER] * 3
    assert bench.all_idle()


async def test_logprobs_come_with_their_tokens_and_the_prompts_with_the_first(bench):
    spec = make_spec(2)
    client, transfer_id = await started(bench, replace(spec, sampling=replace(spec.sampling, logprobs=1)))
    deltas = []
    client.run._notify = lambda: deltas.append(client.run.take())
    bench.decodes[0].reserved(transfer_id)
    told = [common_pb2.TokenLogprobs(token_id=i, logprob=-i, rank=1) for i in range(60)]
    bench.prefills[0].output(transfer_id, prompt_logprobs=[told[11], told[12]], first_prompt_index=1)
    bench.prefills[0].output(transfer_id, prompt_logprobs=[told[12], told[13]], first_prompt_index=2)
    bench.prefills[0].output(transfer_id, first_index=0, token_ids=[50], logprobs=[told[50]], leg_ended=True)
    bench.decodes[0].output(
        transfer_id, first_index=1, token_ids=[51], logprobs=[told[51]], finish_reason="LENGTH", leg_ended=True
    )
    assert [t.token_id for d in deltas for t in d.logprobs] == [50, 51]
    assert [t.token_id for t in deltas[0].prompt_logprobs] == [11, 12, 13]
    assert [d.prompt_logprobs for d in deltas[1:]] == [()] * len(deltas[1:])
