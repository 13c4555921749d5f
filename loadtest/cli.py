"""`baton bench`: load tests of Baton, or of any OpenAI-compatible server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
import uvloop
from rich.console import Console
from typer.exceptions import TyperException

from loadtest.bench import BenchOptions, open_bench
from loadtest.bench_transfer import main as bench_transfer
from loadtest.errors import BenchError
from loadtest.options import LoadOptions, takes_load_options
from loadtest.rate_search import SearchOptions
from loadtest.report.compare import compare_reports
from loadtest.report.page import render_page
from loadtest.report.run_report import request_rows, run_report
from loadtest.report.terminal import print_compare, print_run, print_saturate
from loadtest.runner import RunLimits
from loadtest.saturate import saturate as search_saturation
from loadtest.slo import parse_slo
from loadtest.workloads.registry import workload_help

EXIT_NOTHING_SERVED = 1
EXIT_INVALID = 3

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Load tests of Baton, or of any OpenAI-compatible server.",
)


@app.command()
@takes_load_options
def run(
    load: LoadOptions,
    rate: Annotated[
        float | None, typer.Option(help="open loop: sessions per second", metavar="R", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="closed loop: users at once", metavar="N", show_default=False)
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="end after so many requests", metavar="N", show_default=False)
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="start no request later than this", metavar="SECONDS", show_default=False)
    ] = None,
    speed: Annotated[
        float, typer.Option(help="replay a trace this many times faster [1]", metavar="X", show_default=False)
    ] = 1.0,
    save_requests: Annotated[
        Path | None,
        typer.Option(help="also write one JSON line a request", metavar="FILE", show_default=False),
    ] = None,
) -> None:
    """Put one load on a server and report latencies, throughput, goodput and errors.

    Exits with 1 when nothing was served, and with 3 when the result is invalid (the client was saturated).

    \b
    Examples:
      baton bench run --rate 4 --duration 60 --workload fixed:input=512,output=128
      baton bench run --concurrency 16 --requests 200 --workload sharegpt --api chat
      baton bench run --workload trace:mooncake_conversation.jsonl --speed 2 --duration 300
      baton bench run --rate 8 --arrival gamma --shape 0.25 --requests 500 --slo ttft_ms=500,itl_ms=50
      baton bench run --url grpc://127.0.0.1:8001 --rate 4 --duration 60
      baton bench run --duration 60 --stream "name=gold key=sk-1 rate=2 workload=chat" \\
                      --stream "name=free key=sk-2 rate=6 workload=mixed:max=4096"
    """
    limits = RunLimits(requests=requests, duration_s=duration, timeout_s=load.timeout)
    streams = load.streams(rate=rate, speed=speed, concurrency=concurrency)
    options = load.bench_options(streams, limits)
    report, rows = uvloop.run(_run(options, _progress_console(load)))
    if save_requests is not None:
        _write(save_requests, b"".join(orjson.dumps(row) + b"\n" for row in rows))
    console = Console()
    print_run(report, console)
    _save(report, load.output, console)
    if not report["overall"]["requests"]["ok"]:
        raise typer.Exit(EXIT_NOTHING_SERVED)
    if not report["validity"]["valid"]:
        raise typer.Exit(EXIT_INVALID)


@app.command()
@takes_load_options
def saturate(
    load: LoadOptions,
    fraction: Annotated[
        float, typer.Option(help="share of requests that must meet --slo [0.95]", metavar="X", show_default=False)
    ] = 0.95,
    start_rate: Annotated[
        float, typer.Option(help="first rate tried, sessions per second [1]", metavar="R", show_default=False)
    ] = 1.0,
    max_rate: Annotated[float, typer.Option(help="highest rate tried", metavar="R", show_default=False)] = 10_000.0,
    tolerance: Annotated[
        float, typer.Option(help="stop when the answer is this close [0.05]", metavar="X", show_default=False)
    ] = 0.05,
    probe: Annotated[
        float, typer.Option(help="length of a probe, longer at slow rates [30]", metavar="SECONDS", show_default=False)
    ] = 30.0,
    cool_down: Annotated[
        float,
        typer.Option(help="pause between probes, longer until idle [2]", metavar="SECONDS", show_default=False),
    ] = 2.0,
    max_time: Annotated[
        float, typer.Option(help="start no probe that would end later [900]", metavar="SECONDS", show_default=False)
    ] = 900.0,
) -> None:
    """Find the highest rate at which enough requests still meet the objective.

    \b
    Examples:
      baton bench saturate --slo ttft_ms=500,itl_ms=50 --workload sharegpt
      baton bench saturate --slo ttft_ms=2000,tpot_ms=100 --fraction 0.9 --start-rate 0.5 --probe 60
      baton bench saturate --slo e2e_ms=5000 --stream "name=a rate=1 workload=chat" --stream "name=b rate=3"
    """
    if not load.slo:
        raise BenchError("saturate needs an objective: --slo ttft_ms=…,itl_ms=…")
    search = SearchOptions(
        slo=parse_slo(load.slo),
        fraction=fraction,
        start_rate=start_rate,
        max_rate=max_rate,
        tolerance=tolerance,
        probe_s=probe,
        cool_down_s=cool_down,
        max_time_s=max_time,
    )
    limits = RunLimits(duration_s=probe, timeout_s=load.timeout)
    options = load.bench_options(load.streams(rate=None if load.stream else start_rate), limits)
    report = uvloop.run(_saturate(options, search, _progress_console(load)))
    console = Console()
    print_saturate(report, console)
    _save(report, load.output, console)
    if not report["best_rate_per_s"]:
        raise typer.Exit(EXIT_NOTHING_SERVED)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="report of the first run", metavar="A.json")],
    b: Annotated[Path, typer.Argument(help="report of the second run", metavar="B.json")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="also write this page", metavar="FILE", show_default=False),
    ] = None,
) -> None:
    """Put two runs side by side.

    \b
    Example:
      baton bench compare before.json after.json -o compare.html
    """
    report = compare_reports(a.stem, _read(a), b.stem, _read(b))
    console = Console()
    print_compare(report, console)
    if output is not None:
        _write(output, render_page(report).encode())
        console.print(f"page: {output}", soft_wrap=True)


@app.command()
def report(
    run_file: Annotated[Path, typer.Argument(help="report of a run or of a saturation search", metavar="RUN.json")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="page to write [beside it]", metavar="FILE", show_default=False),
    ] = None,
) -> None:
    """Show a saved report again, and write its page anew.

    \b
    Example:
      baton bench report bench-20260101-120000.json -o report.html
    """
    data = _read(run_file)
    console = Console()
    if str(data.get("schema", "")).startswith("baton.bench.saturate/"):
        print_saturate(data, console)
    else:
        print_run(data, console)
    page = output or run_file.with_suffix(".html")
    _write(page, render_page(data).encode())
    console.print(f"page: {page}", soft_wrap=True)


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="a Mooncake trace, JSONL", show_default=False)],
    prefill: Annotated[int, typer.Option(min=1, help="prefill workers")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="decode workers")] = 4,
    cache_tokens: Annotated[int, typer.Option(min=1024, help="of each worker's KV pool", metavar="N")] = 2_048_000,
    speed: Annotated[float, typer.Option(min=0.01, help="replay so many times faster", metavar="X")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="only the first N; 0: all", metavar="N")] = 0,
    local: Annotated[int, typer.Option(min=0, help="as the setting local_prefill_max_tokens", metavar="N")] = 512,
) -> None:
    """Replay a trace on virtual time: Baton's routing, by the router's own code, beside three simple policies.

    \b
    Example:
      baton bench simulate mooncake_conversation.jsonl --speed 1.5
    """
    from loadtest.simulate.report import SimulateOptions, compare, print_comparison

    options = SimulateOptions(trace, prefill, decode, cache_tokens, speed, requests, local)
    print_comparison(compare(options), Console(highlight=False, width=120))


@app.command()
def workloads() -> None:
    """List the workloads with their settings and defaults.

    \b
    Example:
      baton bench workloads
    """
    typer.echo(workload_help())


app.command("transfer")(bench_transfer)


async def _run(options: BenchOptions, console: Console | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with open_bench(options, console) as bench:
        result = await bench.run(options.streams, options.limits, seed=options.seed)
        context = bench.context(options.streams, options.limits, options.seed)
        return run_report(context, result), request_rows(context, result)


async def _saturate(options: BenchOptions, search: SearchOptions, console: Console | None) -> dict[str, Any]:
    def say(line: str) -> None:
        if console is not None:
            console.print(line, soft_wrap=True, highlight=False)

    async with open_bench(options, console) as bench:
        return await search_saturation(bench, search, say)


def _progress_console(load: LoadOptions) -> Console | None:
    return Console(stderr=True) if load.progress else None


def _save(report: dict[str, Any], output: Path | None, console: Console) -> None:
    path = output or Path(time.strftime("bench-%Y%m%d-%H%M%S.json"))
    page = path.with_suffix(".html")
    _write(path, orjson.dumps(report, option=orjson.OPT_INDENT_2))
    _write(page, render_page(report).encode())
    console.print(f"report: {path}\npage:   {page}", soft_wrap=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = orjson.loads(path.read_bytes())
    except OSError as e:
        raise BenchError(f"{path}: {e.strerror or e}") from e
    except ValueError as e:
        raise BenchError(f"{path}: not a JSON report: {e}") from e
    if not isinstance(data, dict) or not str(data.get("schema", "")).startswith("baton.bench."):
        raise BenchError(f"{path}: not a report of baton bench (no schema baton.bench.…)")
    return data


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as e:
        raise BenchError(f"{path}: {e.strerror or e}") from e


def main() -> None:
    """`python -m loadtest.cli`: what `baton bench` is, without the rest of Baton."""
    try:
        code = app(standalone_mode=False)
    except BenchError as error:
        typer.echo(f"baton bench: {error}", err=True)
        code = error.exit_code
    except TyperException as error:
        typer.echo(f"baton bench: {error.format_message().rstrip('.')}; see --help", err=True)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
