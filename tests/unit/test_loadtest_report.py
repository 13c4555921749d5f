"""Reports hold what happened, pages hold the whole report and load nothing, comparisons name what got worse."""

import html.parser
import io
import re
from array import array

import numpy as np
import orjson
import pytest
from rich.console import Console

from loadtest.cli import main
from loadtest.client.target import TargetInfo
from loadtest.errors import BenchError
from loadtest.gauges import GaugeSeries, read_gauges
from loadtest.monitor import ClientLimits, ClientLoad, saturation_reasons
from loadtest.options import masked_command
from loadtest.rate_search import Probe, SearchOptions, SearchOutcome
from loadtest.record import Failure, RequestRecord
from loadtest.report.compare import compare_reports
from loadtest.report.page import render_page
from loadtest.report.run_report import RunContext, request_rows, run_report
from loadtest.report.terminal import print_compare, print_run, print_saturate
from loadtest.report.timeline import bin_width_s, timeline
from loadtest.runner import RunLimits, RunResult
from loadtest.saturate import saturate_report
from loadtest.slo import Slo
from loadtest.streams import parse_stream

ORIGIN = 5000.0


def record(index, intended, ttft=0.1, itl=0.01, tokens=4, stream=0, failure=None):
    start = ORIGIN + intended
    made = RequestRecord(
        index=index, stream=stream, turn=0, intended_s=start, requested_tokens=tokens, sent_s=start + 0.001
    )
    made.events_s = array("d", [start + ttft + i * itl for i in range(tokens)])
    made.event_tokens = made.usage_output_tokens = tokens
    made.usage_prompt_tokens, made.usage_cached_tokens = 10, 5
    made.finish_reason = "length"
    made.end_s = made.events_s[-1]
    if failure:
        made.fail(failure, "</script><b>what happened</b>")
    return made


def make_report(ttft=0.1, *, streams=("name=a rate=1", "name=b class=slow rate=1"), lag=0.0, stopped="", fail=True):
    result = RunResult(ORIGIN, 1.7e9, stopped=stopped)
    result.records = [record(i, i * 0.1, ttft, stream=i % 2) for i in range(40)]
    if fail:
        result.records.append(record(40, 1.0, failure=Failure.STREAM_ERROR))
    result.client = ClientLoad(array("d", [lag] * 100), array("d", [0.1]))
    gauges = read_gauges(b"baton_requests_running 3\nbaton_requests_waiting 1\nbaton_kv_cache_usage_ratio 0.5\n")
    result.gauges = GaugeSeries([ORIGIN + 1.0], {k: [v] for k, v in gauges.items()})
    context = RunContext(
        target=TargetInfo("http://127.0.0.1:1", "completions", "m"),
        streams=[parse_stream(s) for s in streams],
        limits=RunLimits(requests=41),
        seed=0,
        command="baton bench run",
        slo=Slo(ttft_ms=150),
    )
    return run_report(context, result), request_rows(context, result)


def make_saturation():
    options = SearchOptions(slo=Slo(ttft_ms=150))
    run, _ = make_report()
    probes = [Probe(1.0, 1.0, run), Probe(2.0, 0.5, run), Probe(1.4, 0.9, run, client_saturated=True)]
    return saturate_report(options, SearchOutcome(1.0, 2.0, "found", probes))


def test_a_report_is_plain_json_and_adds_up():
    report, rows = make_report()
    assert orjson.loads(orjson.dumps(report)) == report
    assert report["schema"] == "baton.bench.run/1"
    overall, tenants = report["overall"], report["tenants"]
    assert overall["requests"] == {"sent": 41, "ok": 40, "failed": 1, "cancelled": 0}
    assert sum(t["requests"]["sent"] for t in tenants.values()) == 41
    assert sum(t["throughput"]["requests_per_s"] for t in tenants.values()) == pytest.approx(
        overall["throughput"]["requests_per_s"]
    )
    assert set(report["classes"]) == {"default", "slow"}
    assert overall["cache"]["hit_ratio"] == 0.5
    assert overall["goodput"]["good"] == 40
    assert report["validity"] == {"valid": True, "reasons": [], "notes": []}
    assert len(rows) == 41
    assert rows[0]["intended_s"] == 0.0


def test_warm_up_loads_but_is_not_measured():
    result = RunResult(ORIGIN, 1.7e9)
    result.records = [record(0, 0.0, ttft=9.0), record(1, 5.0)]
    context = RunContext(
        TargetInfo("u", "completions", "m"), [parse_stream("name=a rate=1")], RunLimits(requests=2), 0, "", warmup_s=1.0
    )
    report = run_report(context, result)
    assert report["overall"]["requests"]["sent"] == 1
    assert report["overall"]["latency_ms"]["ttft"]["max"] == pytest.approx(100.0)
    assert sum(report["timeline"]["due_per_s"]) > 1


def test_a_run_that_measured_nothing_is_invalid():
    result = RunResult(ORIGIN, 1.7e9, stopped="interrupted (Ctrl-C)")
    context = RunContext(TargetInfo("u", "grpc", "m"), [parse_stream("name=a rate=1")], RunLimits(requests=1), 0, "")
    report = run_report(context, result)
    assert not report["validity"]["valid"]
    assert len(report["validity"]["reasons"]) == 2
    assert "Result invalid" in render_page(report)


@pytest.mark.parametrize(
    ("measured", "word"),
    [
        ({"send_lag_p99_s": 0.2}, "due"),
        ({"load": ClientLoad(array("d", [0.1] * 50), array("d", [0.2]))}, "event loop"),
        ({"load": ClientLoad(array("d", [0.0]), array("d", [0.95, 0.99, 0.5]))}, "core"),
    ],
)
def test_a_client_that_fell_behind_says_so(measured, word):
    calm = {"send_lag_p99_s": 0.001, "ttft_p50_s": 0.1, "itl_p50_s": 0.01, "load": ClientLoad()}
    assert saturation_reasons(ClientLimits(), **calm) == []
    [reason] = saturation_reasons(ClientLimits(), **calm | measured)
    assert reason.startswith("client saturated")
    assert word in reason


def test_a_client_that_others_held_up_says_that_too():
    load = ClientLoad(array("d", [0.1] * 50), array("d", [0.02]))
    [reason] = saturation_reasons(ClientLimits(), send_lag_p99_s=0, ttft_p50_s=0.1, itl_p50_s=0.01, load=load)
    assert "other processes" in reason
    load.cpu_ratio = array("d", [0.8])
    [reason] = saturation_reasons(ClientLimits(), send_lag_p99_s=0, ttft_p50_s=0.1, itl_p50_s=0.01, load=load)
    assert "other processes" not in reason


def test_lag_that_is_small_against_what_it_distorts_is_borne():
    slow_server = {
        "send_lag_p99_s": 0.2,
        "ttft_p50_s": 3.0,
        "itl_p50_s": 0.3,
        "load": ClientLoad(array("d", [0.1] * 9)),
    }
    assert saturation_reasons(ClientLimits(), **slow_server) == []


def test_the_timeline_accounts_for_every_request_and_token():
    records = [record(i, i * 0.05) for i in range(200)]
    span = max(r.end_s for r in records) - ORIGIN
    made = timeline(records, GaugeSeries(), ORIGIN, span)
    assert sum(made["due_per_s"]) * made["bin_s"] == pytest.approx(200)
    assert sum(made["finished_per_s"]) * made["bin_s"] == pytest.approx(200)
    assert sum(made["output_tokens_per_s"]) * made["bin_s"] == pytest.approx(800)
    assert made["in_flight"][-1] == 0
    assert 0 < max(made["in_flight"]) <= 3
    assert made["server"] is None


@pytest.mark.parametrize("span", [0.01, 1.0, 19.9, 60.0, 3600.0, 86_400.0])
def test_timelines_stay_small(span):
    assert span / bin_width_s(span) <= 80


def test_known_gauges_are_read_and_summed_over_workers():
    page = (
        b"# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4\n'
        b'vllm:num_requests_waiting{engine="0"} 1e1\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        b'vllm:kv_cache_usage_perc{engine="1"} 0.75\nvllm:num_requests_running_total 99\n'
    )
    assert read_gauges(page) == {"running": 7.0, "waiting": 10.0, "kv_use": 0.75}
    assert read_gauges(b"something_else 1\n") == {}


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.found += [v for k, v in attrs if k in ("src", "href", "action")]


@pytest.mark.parametrize("make", [lambda: make_report()[0], make_saturation])
def test_pages_hold_the_whole_report_and_load_nothing(make):
    report = make()
    page = render_page(report)
    links = Links()
    links.feed(page)
    assert links.found == []
    # Text of the server can't break out of the data.
    assert links.scripts == 2
    assert not re.search(r"@[A-Z]+@", page)
    data = re.search(r'<script id="report" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert orjson.loads(data[1]) == orjson.loads(orjson.dumps(report))
    assert not re.search(r"""(fetch|import|XMLHttpRequest)\s*\(|url\(|@import""", page)


def test_a_comparison_names_better_and_worse():
    a, b = make_report(0.1)[0], make_report(0.2, fail=False)[0]
    made = compare_reports("a", a, "b", b)
    rows = {(r["group"], r["name"]): r for r in made["rows"]}
    ttft = rows["TTFT", "p50"]
    assert (ttft["verdict"], ttft["change"]) == ("worse", pytest.approx(1.0))
    assert rows["ITL", "p50"]["verdict"] == "same"
    assert rows["Outcome", "failed requests"]["verdict"] == "better"
    assert rows["Outcome", "requests within the objective"]["verdict"] == "worse"
    assert made["warnings"] == []
    other = make_report(streams=("name=a rate=2", "name=b rate=1"))[0]
    assert any("different loads" in w for w in compare_reports("a", a, "o", other)["warnings"])
    assert "a" in render_page(made)


def test_only_runs_can_be_compared():
    with pytest.raises(BenchError, match="compare needs"):
        compare_reports("a", make_report()[0], "b", {"schema": "baton.bench.run/2"})


def test_every_report_fits_a_narrow_terminal():
    run, _ = make_report(stopped="interrupted", lag=0.5)
    shown = io.StringIO()
    console = Console(file=shown, width=80)
    print_run(run, console)
    print_saturate(make_saturation(), console)
    print_compare(compare_reports("a", run, "b", run), console)
    text = shown.getvalue()
    assert "RESULT INVALID: client saturated" in text
    assert "stream_error" in text
    assert "highest rate" in text
    assert "…" not in text.replace("<b>what happened</b>", "")


@pytest.mark.parametrize(
    ("argv", "hidden"),
    [
        (["/x/baton", "bench", "--api-key", "sk-1"], "sk-1"),
        (["/x/baton", "--api-key=sk-2"], "sk-2"),
        (["/x/baton", "--stream", "name=a key=sk-3 rate=1"], "sk-3"),
        (["/x/baton", "--header", "Authorization: Bearer sk-4"], "sk-4"),
    ],
)
def test_keys_stay_out_of_reports(argv, hidden):
    assert hidden not in masked_command(argv)
    assert masked_command(argv).startswith("baton ")


@pytest.mark.parametrize(
    "argv",
    [
        ["run"],
        ["run", "--rate", "x"],
        ["run", "--rate", "1"],
        ["run", "--rate", "1", "--concurrency", "2", "--requests", "1"],
        ["run", "--rate", "1", "--requests", "0"],
        ["run", "--rate", "1", "--requests", "1", "--url", "https://127.0.0.1"],
        ["run", "--rate", "1", "--requests", "1", "--url", "127.0.0.1:8000"],
        ["run", "--rate", "1", "--requests", "1", "--api", "embeddings"],
        ["run", "--rate", "1", "--requests", "1", "--slo", "fast"],
        ["run", "--rate", "1", "--requests", "1", "--extra-body", "[]"],
        ["run", "--rate", "1", "--requests", "1", "--header", "nothing"],
        ["run", "--rate", "1", "--requests", "1", "--workload", "trace:/absent"],
        ["run", "--rate", "1", "--duration", "5", "--warmup", "5"],
        ["run", "--requests", "1", "--stream", "name=a rate=1", "--stream", "name=a rate=2"],
        ["run", "--requests", "1", "--rate", "1", "--stream", "name=a rate=1"],
        ["saturate"],
        ["saturate", "--slo", "ttft_ms=1", "--fraction", "2"],
        ["compare", "absent.json", "absent.json"],
        ["report", "absent.json"],
    ],
)
def test_mistakes_of_the_user_are_one_line_and_exit_code_two(argv, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["bench", *argv])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr()
    assert caught.value.code == 2
    assert shown.err.startswith("baton bench: ")
    assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_saved_report_is_shown_again_and_compared(tmp_path, monkeypatch, capsys):
    for name, ttft in (("a", 0.1), ("b", 0.3)):
        (tmp_path / f"{name}.json").write_bytes(orjson.dumps(make_report(ttft)[0]))
    (tmp_path / "s.json").write_bytes(orjson.dumps(make_saturation()))
    for argv in (["report", "a.json"], ["report", "s.json"], ["compare", "a.json", "b.json", "-o", "c.html"]):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["bench", *argv])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
    assert {p.name for p in tmp_path.iterdir()} >= {"a.html", "s.html", "c.html"}
    assert "B worse" in capsys.readouterr().out


def test_saturation_reports_keep_every_probe_and_the_best_run():
    made = make_saturation()
    assert [p["rate_per_s"] for p in made["probes"]] == [1.0, 1.4, 2.0]
    assert [p["valid"] for p in made["probes"]] == [True, False, True]
    assert (made["best_rate_per_s"], made["failed_rate_per_s"]) == (1.0, 2.0)
    assert made["best"]["schema"] == "baton.bench.run/1"
    assert not np.isnan(made["probes"][0]["goodput_per_s"])
