"""Whole runs against a mock server on loopback: nothing but the plan sets the pace, and nothing is lost."""

import asyncio
import contextlib
import itertools
import time

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from loadtest.bench import BenchOptions, open_bench
from loadtest.cli import app
from loadtest.client.openai import OpenAITarget
from loadtest.client.target import GenerationOptions
from loadtest.errors import BenchError
from loadtest.gauges import GaugeSampler
from loadtest.prompts import PromptMaker, words_of
from loadtest.rate_search import SearchOptions
from loadtest.record import Failure
from loadtest.report.run_report import run_report
from loadtest.runner import LoadRun, RunLimits
from loadtest.saturate import saturate
from loadtest.slo import Slo
from loadtest.streams import parse_stream
from loadtest.timer import Alarms
from loadtest.tokens import TokenSource
from tests.fakes.mock_openai_server import MockServer, Timings, until

FAST = Timings(ttft_s=0.002, itl_s=0.001)


@contextlib.asynccontextmanager
async def mock_server(timings=FAST):
    server = MockServer(timings)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def run_load(server, *streams, form="ids", api="completions", seed=0, on_start=None, fault="", **limits):
    """Runs streams to their end and gives the result."""
    options = GenerationOptions(model="mock", extra_body=(("mock_fault", fault),) if fault else ())
    target = OpenAITarget(server.url, api, options)
    maker = PromptMaker(form, words_of, TokenSource(seed))
    on_done = limits.pop("on_done", None)
    run = LoadRun(target, [parse_stream(s) for s in streams], maker, RunLimits(**limits), seed=seed, on_done=on_done)
    try:
        task = asyncio.create_task(run.run())
        if on_start is not None:
            on_start(run)
        return await task
    finally:
        await target.close()


async def test_an_open_loop_sends_what_is_planned_when_it_is_planned():
    async with mock_server() as server:
        result = await run_load(server, "name=a rate=200 workload=fixed:input=5,output=3", requests=60)
    planned = list(itertools.islice(parse_stream("name=a rate=200").arrival.offsets("a/0"), 60))
    records = sorted(result.records, key=lambda r: r.index)
    assert [r.intended_s - result.origin_s for r in records] == pytest.approx(planned)
    assert all(r.ok and r.output_tokens == 3 for r in records)
    # Never early, and never measured from the actual send.
    assert all(r.sent_s >= r.intended_s for r in records)
    assert len(server.requests) == 60
    assert all(len(r["prompt"]) == 5 for r in server.requests)


async def test_the_same_seed_sends_the_same_prompts():
    async with mock_server() as server:
        for seed in (1, 1, 2):
            await run_load(server, "name=a rate=500 workload=sharegpt:max_output=2", requests=10, seed=seed)
        first, second, third = (sorted(map(str, server.requests[i : i + 10])) for i in (0, 10, 20))
    assert first == second != third


async def test_a_stalled_server_is_charged_with_all_the_waiting():
    """Coordinated omission: a closed client would have sent one request into the stall; all due must count."""
    stall = (0.2, 0.7)
    async with mock_server(Timings(ttft_s=0.001, itl_s=0.001, stall_s=stall)) as server:
        result = await run_load(
            server, "name=a arrival=constant rate=100 workload=fixed:input=4,output=1", duration_s=0.8
        )
        end = server.origin + stall[1]
    hit = [r for r in result.records if server.origin + stall[0] <= r.intended_s < end - 0.01]
    assert len(hit) >= 30
    # Every request due in the stall was sent in it, and waited for its end.
    assert all(r.ttft_s >= end - r.intended_s for r in hit)
    assert len(result.records) == 80


async def test_a_blocked_client_charges_its_own_lateness_and_declares_itself_saturated():
    blocked = []

    def block(record):
        if len(blocked) < 1:
            start = time.perf_counter()
            time.sleep(0.3)  # The client's event loop stands still: that is the condition under test.
            blocked.append((start, time.perf_counter()))

    async with mock_server() as server:
        result = await run_load(
            server, "name=a arrival=constant rate=100 workload=fixed:input=4,output=1", duration_s=0.6, on_done=block
        )
        streams = [parse_stream("name=a arrival=constant rate=100")]
        options = BenchOptions(server.url, streams, RunLimits(duration_s=0.6))
        async with open_bench(options) as bench:
            report = run_report(bench.context(options.streams, options.limits, 0), result)
    [(start, end)] = blocked
    hit = [r for r in result.records if start < r.intended_s < end]
    assert len(hit) >= 20
    assert all(r.sent_s >= end and r.ttft_s > end - r.intended_s for r in hit)
    assert not report["validity"]["valid"]
    assert "client saturated" in report["validity"]["reasons"][0]


async def test_a_closed_loop_never_runs_more_than_its_users():
    most = 0

    def watch(run):
        nonlocal most
        add = run.running.add

        class Counting(set):
            def add(self, item):
                nonlocal most
                add(item)
                set.add(self, item)
                most = max(most, len(self))

        run.running = Counting()

    async with mock_server() as server:
        result = await run_load(
            server, "name=a concurrency=5 workload=fixed:input=4,output=3", requests=40, on_start=watch
        )
    assert len(result.records) == 40
    assert most == 5
    assert server.accepted == 5


async def test_streams_share_a_run_and_keep_their_own_pace():
    async with mock_server() as server:
        result = await run_load(
            server,
            "name=a key=ka rate=100 workload=fixed:input=4,output=1",
            "name=b key=kb concurrency=2 workload=fixed:input=9,output=2",
            duration_s=0.3,
        )
    counts = [sum(r.stream == i for r in result.records) for i in (0, 1)]
    assert min(counts) >= 5
    sent = {(h["authorization"], len(r["prompt"])) for h, r in zip(server.headers, server.requests, strict=True)}
    assert sent == {("Bearer ka", 4), ("Bearer kb", 9)}


async def test_streams_with_equal_workloads_do_not_share_prompts():
    async with mock_server() as server:
        streams = [f"name={n} concurrency=1 workload=fixed:input=8,output=1" for n in "ab"]
        await run_load(server, *streams, requests=8)
        prompts = [tuple(r["prompt"]) for r in server.requests]
    assert len(set(prompts)) == 8


async def test_conversations_send_the_servers_own_tokens_back():
    async with mock_server() as server:
        spec = "name=a concurrency=1 workload=chat:turns=3,system=10,input=5,output=2,think_s=0"
        result = await run_load(server, spec, requests=6)
        prompts = [r["prompt"] for r in server.requests]
    assert [r.turn for r in sorted(result.records, key=lambda r: r.index)] == [0, 1, 2, 0, 1, 2]
    assert [len(p) for p in prompts] == [15, 22, 29] * 2
    assert prompts[1][:15] == prompts[0]
    # The mock answers with ids 0, 1, …
    assert prompts[1][15:17] == [0, 1]
    assert prompts[0][:10] == prompts[3][:10]
    by_turn = sorted(result.records, key=lambda r: r.index)
    assert all(b.intended_s >= a.end_s for a, b in itertools.pairwise(by_turn))


async def test_chat_over_messages_sends_the_answers_text_back():
    async with mock_server() as server:
        spec = "name=a concurrency=1 workload=chat:turns=2,system=3,input=4,output=2,think_s=0"
        await run_load(server, spec, form="messages", api="chat", requests=2)
        messages = server.requests[1]["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == " tok tok"


async def test_a_failed_turn_ends_its_conversation():
    async with mock_server() as server:
        spec = "name=a rate=100 workload=chat:turns=3,think_s=0"
        result = await run_load(server, spec, requests=4, fault="error")
    assert [r.turn for r in result.records] == [0, 0, 0, 0]
    assert {r.failure for r in result.records} == {Failure.STREAM_ERROR}


async def test_a_trace_ends_the_run_and_its_times_can_be_scaled(tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {t}, "input_length": 600, "output_length": 2, "hash_ids": [1, {t}]}}\n'
            for t in (0, 400, 1000)
        )
    )
    async with mock_server() as server:
        result = await run_load(server, f"name=a arrival=trace speed=10 workload=trace:path={trace}")
        prompts = [r["prompt"] for r in server.requests]
    assert [r.intended_s - result.origin_s for r in result.records] == pytest.approx([0.0, 0.04, 0.1])
    assert prompts[0][:512] == prompts[1][:512] == prompts[2][:512]
    assert prompts[0][512:] != prompts[1][512:]


async def test_requests_without_an_end_time_out_and_leave_no_connection():
    async with mock_server() as server:
        result = await run_load(
            server, "name=a rate=100 workload=fixed:output=9", requests=5, timeout_s=0.1, fault="silence"
        )
        assert {r.failure_name for r in result.records} == {"timeout"}
        assert all(len(r.events_s) == 2 for r in result.records)
        await until(lambda: not server.connections and not server.running)


async def test_a_stopped_run_keeps_what_it_has_and_gives_up_the_rest():
    runs = []

    def stop_once_both_run(record):
        [run] = runs
        if record.ok and any(r.stream == 1 for r in run.running):
            run.stop("interrupted (Ctrl-C)")

    async with mock_server(Timings(ttft_s=0.01, itl_s=0.01)) as server:
        result = await run_load(
            server,
            "name=a rate=50 workload=fixed:output=2",
            "name=b rate=50 workload=fixed:output=100000",
            duration_s=60.0,
            on_start=runs.append,
            on_done=stop_once_both_run,
        )
        assert result.stopped == "interrupted (Ctrl-C)"
        assert {r.failure for r in result.records if r.stream == 1} == {Failure.CANCELLED}
        assert any(r.ok for r in result.records if r.stream == 0)
        await until(lambda: not server.running)


async def test_an_endless_plan_is_refused():
    async with mock_server() as server:
        with pytest.raises(BenchError, match="no end given"):
            await run_load(server, "name=a rate=1")


async def test_a_workload_that_breaks_in_mid_run_ends_it_with_its_own_error(tmp_path):
    async with mock_server() as server:

        def spoil(run):
            def fail():
                raise BenchError("the workload broke")

            run._plans[0].next_due_s = fail

        with pytest.raises(BenchError, match="the workload broke"):
            await run_load(server, "name=a rate=100", duration_s=30.0, on_start=spoil)


async def test_alarms_ring_in_order_and_never_early():
    alarms = Alarms()
    rung = []
    start = time.perf_counter()
    for delay in (0.03, 0.01, 0.02, -1.0):
        alarms.at(start + delay, lambda delay=delay: rung.append((delay, time.perf_counter() - start)))
    async with asyncio.timeout(5):
        await alarms.wait_until(start + 0.04)
    alarms.close()
    assert [delay for delay, _ in rung] == [-1.0, 0.01, 0.02, 0.03]
    assert all(at >= delay for delay, at in rung)


async def test_server_gauges_are_sampled_and_their_absence_is_borne():
    async with mock_server() as server:
        sampler = GaugeSampler(f"{server.url}/metrics")
        assert await sampler.sample() == {"running": 0.0, "waiting": 0.0, "kv_use": 0.0}
        sampler.close()
        absent = GaugeSampler(f"{server.url}/absent")
        async with asyncio.timeout(5):
            await absent.run()
        assert absent.series.times_s == []


async def test_saturation_of_a_server_of_known_capacity_is_bracketed():
    """4 slots of 20 ms each: 200 requests a second. Bounds, not closeness: the machine may be busy."""
    async with mock_server(Timings(ttft_s=0.01, itl_s=0.01, slots=4)) as server:
        options = BenchOptions(
            server.url,
            [parse_stream("name=a arrival=constant rate=1 workload=fixed:input=4,output=2")],
            RunLimits(duration_s=0.5, timeout_s=5.0),
            slo=Slo(ttft_ms=100),
        )
        search = SearchOptions(
            slo=Slo(ttft_ms=100), start_rate=25.0, probe_s=0.5, tolerance=0.5, cool_down_s=0.0, max_time_s=20.0
        )
        said = []
        async with open_bench(options) as bench:
            report = await saturate(bench, search, said.append)
    assert report["schema"] == "baton.bench.saturate/1"
    assert len(said) == len(report["probes"])
    # Twice the capacity for half a second puts the last requests 250 ms behind: no luck can pass that.
    assert (report["best_rate_per_s"] or 0.0) < 400.0
    assert all(p["rate_per_s"] < 400.0 for p in report["probes"] if p["passed"])


def test_the_command_runs_reports_and_exits_by_the_outcome(tmp_path):
    def invoke(port, *extra):
        return CliRunner().invoke(
            app,
            [
                *("run", "--url", f"http://127.0.0.1:{port}", "--rate", "100", "--requests", "20", "--no-progress"),
                *("--workload", "fixed:input=4,output=2", "--max-lag-ms", "60000", "-o", str(tmp_path / "r.json")),
                *extra,
            ],
        )

    async def with_server(*extra):
        async with mock_server() as server:
            return await asyncio.to_thread(invoke, server.port, *extra)

    done = asyncio.run(with_server("--slo", "ttft_ms=60000", "--save-requests", str(tmp_path / "r.jsonl")))
    assert done.exit_code == 0, done.output
    report = orjson.loads((tmp_path / "r.json").read_bytes())
    assert report["overall"]["requests"]["ok"] == 20
    assert report["overall"]["goodput"]["fraction"] == 1.0
    assert report["timeline"]["server"] is not None
    assert "<!doctype html>" in (tmp_path / "r.html").read_text()
    rows = [orjson.loads(line) for line in (tmp_path / "r.jsonl").read_bytes().splitlines()]
    assert len(rows) == 20
    assert all(len(r["events_s"]) == 2 for r in rows)
    assert np.all(np.diff([r["intended_s"] for r in rows]) >= 0)

    failed = asyncio.run(with_server("--extra-body", '{"mock_fault": "http_503"}'))
    assert failed.exit_code == 1
    assert "20 × http_503" in failed.output
