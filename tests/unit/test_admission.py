"""Windows that follow what is measured, predictions, and how much of a full router one tenant may hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BatonError, ErrorKind
from router.policy import admission as policy
from router.policy.admission import AtWorkers, Backlog, Interval, Targets, Windows, adjust
from router.tenancy.tenant import Tenant
from tests.fakes.router_parts import Bench, make_spec, settle

TARGETS = Targets(ttft_s=0.25, itl_s=0.03)
CALM = Interval(
    num_first_tokens=100, mean_ttft_s=0.1, num_gaps=1000, mean_itl_s=0.01, prefilled_tokens=1000, busy_s=1.0,
    prefill_was_limit=True, running_was_limit=True,
)  # fmt: skip


def test_windows_grow_while_they_are_the_limit_and_shrink_above_the_target():
    start = Windows(prefill_tokens=1000.0, running=100.0)
    grown = adjust(start, CALM, TARGETS, 50)
    assert (grown.prefill_tokens, grown.running) == pytest.approx((1150.0, 115.0))
    idle = adjust(start, replace(CALM, prefill_was_limit=False, running_was_limit=False), TARGETS, 50)
    assert (idle.prefill_tokens, idle.running) == (1000.0, 100.0)
    late = adjust(start, replace(CALM, mean_ttft_s=0.3, mean_itl_s=0.04), TARGETS, 50)
    assert (late.prefill_tokens, late.running) == pytest.approx((700.0, 35.0))


def test_a_window_needs_evidence_to_move():
    few = replace(CALM, num_first_tokens=3, mean_ttft_s=9.0, num_gaps=3, mean_itl_s=9.0)
    assert adjust(Windows(1000.0, 100.0), few, TARGETS, 50).prefill_tokens == 1000.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1), st.booleans(), st.integers(0, 500)), min_size=1, max_size=50)
)
def test_windows_keep_their_bounds_whatever_is_measured(seen):
    windows = Windows()
    for ttft_s, itl_s, limit, running in seen:
        interval = replace(CALM, mean_ttft_s=ttft_s, mean_itl_s=itl_s, prefill_was_limit=limit, running_was_limit=limit)
        windows = adjust(windows, interval, TARGETS, running)
    assert policy.MIN_PREFILL_TOKENS <= windows.prefill_tokens <= policy.MAX_PREFILL_TOKENS
    assert policy.MIN_RUNNING <= windows.running <= policy.MAX_RUNNING


def test_the_window_settles_where_the_target_is_met():
    """A worker of 2,000 tokens/s whose TTFT is what stands before a prompt: half the target's worth stays in reach."""
    windows = Windows()
    for _ in range(60):
        ttft_s = windows.prefill_tokens / 2000
        windows = adjust(windows, replace(CALM, mean_ttft_s=ttft_s), TARGETS, 10)
    assert 0.4 * 500 <= windows.prefill_tokens <= 1.2 * 500


def test_one_prompt_a_worker_may_always_go():
    full = AtWorkers(10**6, 1, 1, num_prefill_workers=2, num_decode_workers=1)
    assert policy.prefill_has_room(Windows(), full, 10**6, contended=True)
    assert not policy.prefill_has_room(Windows(), replace(full, num_prefilling=2), 10**6, contended=True)
    assert policy.prefill_has_room(Windows(), replace(full, num_prefilling=2), 10**6, contended=False)


def test_a_newcomers_wait_counts_its_own_backlog_and_the_others_share():
    assert policy.tokens_ahead(Backlog(0, 10_000, 1.0, 1.0)) == 0
    assert policy.tokens_ahead(Backlog(1000, 10_000, 1.0, 1.0)) == 2000
    assert policy.tokens_ahead(Backlog(1000, 10_000, 4.0, 1.0)) == 1250
    assert policy.tokens_ahead(Backlog(1000, 1200, 1.0, 1.0)) == 1200


@given(st.integers(1, 2000), st.floats(0.1, 10))
def test_a_flood_never_takes_the_last_place(limit, weight):
    used = 0
    while used < policy.fair_limit(limit, used, 1.0) and used < limit:
        used += 1
    assert used <= limit // 2 + 1
    assert limit == 1 or policy.fair_limit(limit, used, weight) >= 1


# -- with runs


def of(tenant: str, **fields):
    return replace(make_spec(), tenant=Tenant(tenant, **fields))


async def test_what_has_no_room_waits_and_goes_when_there_is():
    bench = Bench(max_in_flight=10)
    bench.admission._capacity = lambda: replace_capacity(1)
    bench.admission.windows = Windows(prefill_tokens=256.0)
    runs = [bench.dispatcher.submit(replace(make_spec(), prompt_token_ids=list(range(200))), lambda: None)
            for _ in range(4)]  # fmt: skip
    await settle()
    assert len(bench.placer.calls) == 2
    runs[0].abort()
    await settle()
    assert len(bench.placer.calls) == 3
    runs[3].abort()
    for run in runs:
        run.abort()
    await settle()
    assert bench.all_idle()
    assert len(bench.admission.queue) == 0


async def test_the_deadline_ends_what_still_waits_for_its_turn():
    bench = Bench(max_in_flight=10)
    bench.admission._capacity = lambda: replace_capacity(0)
    bench.admission.windows = Windows(prefill_tokens=256.0, running=1.0)
    first = bench.dispatcher.submit(make_spec(), lambda: None)
    second = bench.dispatcher.submit(make_spec(timeout_s=0.01), lambda: None)
    ended = asyncio.Event()
    second._notify = ended.set
    await asyncio.wait_for(ended.wait(), 5)
    assert second.take().end.kind is ErrorKind.DEADLINE_EXCEEDED
    assert len(bench.placer.calls) == 1
    record = bench.observed.records[-1]
    assert (record.phase, record.attempts[0].placing_at) == ("queued", None)
    first.abort()
    assert bench.all_idle()


async def test_what_can_not_have_its_first_token_in_time_is_refused_at_once_with_the_time_to_wait():
    bench = Bench()
    bench.admission.windows = Windows(prefill_rate=10.0)
    with pytest.raises(BatonError, match="first token is to be expected") as caught:
        bench.dispatcher.submit(replace(make_spec(timeout_s=1.0), lease_id="l"), lambda: None)
    assert caught.value.kind is ErrorKind.DEADLINE_UNREACHABLE
    assert caught.value.retry_after_s == pytest.approx(1.0, abs=0.2)  # 20 tokens at 10/s, 1 s left
    assert bench.leases.released == [("l", 0)]
    bench.dispatcher.submit(make_spec(timeout_s=3.0), lambda: None).abort()


async def test_more_than_the_router_can_ever_hold_is_no_overload():
    """A client that is told to come back later would do so for ever."""
    dispatcher = Bench(max_in_flight=10).dispatcher
    dispatcher.check_room(10)
    with pytest.raises(BatonError, match="11 continuations") as caught:
        dispatcher.check_room(11)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


async def test_a_tenant_that_floods_leaves_room_for_others():
    bench = Bench(max_in_flight=10)
    runs = [bench.dispatcher.submit(of("flood"), lambda: None) for _ in range(5)]
    with pytest.raises(BatonError) as caught:
        bench.dispatcher.submit(of("flood"), lambda: None)
    assert caught.value.kind is ErrorKind.OVERLOADED
    runs.append(bench.dispatcher.submit(of("other"), lambda: None))
    for run in runs:
        run.abort()
    await settle()
    assert bench.all_idle()
    assert bench.admission._usage == {}


async def test_a_tenants_kv_share_makes_it_wait_and_nobody_else():
    bench = Bench(max_in_flight=100)
    bench.admission._capacity = lambda: replace_capacity(1000)
    greedy = [bench.dispatcher.submit(of("greedy", kv_share=0.5), lambda: None) for _ in range(20)]
    other = [bench.dispatcher.submit(of("other"), lambda: None) for _ in range(5)]
    await settle()
    # 24 tokens each (prompt and output), half of the pool of 480: 10 of its own go, and all of the other's.
    assert len(bench.placer.calls) == 10 + 5
    for run in (*greedy, *other):
        run.abort()
    await settle()
    assert bench.all_idle()


async def test_a_lease_is_held_while_it_runs_and_given_back_with_its_output():
    bench = Bench()
    run = bench.dispatcher.submit(replace(make_spec(), lease_id="l"), lambda: None)
    assert bench.leases.held == {"l"}
    run.abort()
    assert bench.leases.released == [("l", 0)]


def replace_capacity(num_prefill_workers: int):
    from router.admission import Capacity

    return Capacity(num_prefill_workers, 1, 480)
