"""The `baton` command. Each subcommand reads its settings, then imports what it runs: torch only where it computes."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from common.config import Resolved, Settings
from common.errors import StartupError
from deploy.options import takes_settings
from deploy.tenant_commands import tenant_app

HOW_TO_START = """\
Baton serves language models with prefill and decode as separate services.

  baton serve                  a whole cluster on this machine, with a small default model
  baton serve --model DIR      the same with your model (a Hugging Face folder)
  baton serve --help           its options

The parts alone, for several machines:
  baton router | prefill | decode --redis-url redis://HOST:6379

Measure it, or any OpenAI-compatible server:
  baton bench run --help

Take a worker out of service:
  baton drain WORKER_ID --redis-url redis://HOST:6379

Who may ask, and how much:
  baton tenant --help

More: baton model fetch, baton check-config, baton version; each has --help."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
model_app = typer.Typer(rich_markup_mode=None)
app.add_typer(model_app, name="model")
app.add_typer(tenant_app, name="tenant")

_WORKER_OPTIONS = (
    "redis_url",
    "model",
    "dtype",
    "device",
    "quantization",
    "tensor_parallel",
    "host",
    "grpc_port",
    "advertise_host",
    "transfer_security",
    "require_transport",
    "metrics_port",
    "worker_id",
    "kv_cache_bytes",
    "max_running",
    "num_threads",
    "nice",
    "log_format",
)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """LLM serving with disaggregated prefill and decode."""
    if context.invoked_subcommand is None:
        typer.echo(HOW_TO_START)


@app.command()
@takes_settings(
    "host", "port", "grpc_port", "router_processes", "prefill", "decode", "model", "dtype", "device", "quantization",
    "tensor_parallel", "kv_cache_bytes", "redis_url",
)  # fmt: skip
def serve(
    settings: Settings,
    demo: Annotated[bool, typer.Option(help="show one streamed answer once ready")] = True,
) -> None:
    """Start a whole cluster on this machine: Redis, a router, prefill and decode workers.

    \b
    Examples:
      baton serve
      baton serve --port 9000 --prefill 2 --decode 2
      baton serve --model ~/models/llama --dtype bfloat16 --set kv_cache_bytes=2147483648
    """
    from common.telemetry import configure_logging
    from deploy.serve import serve as run_cluster

    configure_logging(settings.log_level, settings.log_format, "supervisor")
    raise typer.Exit(run_cluster(settings, demo=demo))


@app.command()
@takes_settings(
    "redis_url", "model", "quantization", "host", "port", "grpc_port", "served_model_name", "max_waiting", "log_format"
)
def router(settings: Settings) -> None:
    """Start a router: the HTTP and gRPC front of a cluster.

    \b
    Example:
      baton router --redis-url redis://10.0.0.5:6379 --host 0.0.0.0 --port 8000 --grpc-port 8001
    """
    from deploy.role import run_role

    run_role("router", settings)


@app.command()
@takes_settings(*_WORKER_OPTIONS, "prefill_budget_tokens")
def prefill(settings: Settings) -> None:
    """Start a prefill worker: it computes prompts and passes their KV cache on.

    \b
    Example:
      baton prefill --redis-url redis://10.0.0.5:6379 --host 0.0.0.0 --advertise-host 10.0.0.7 \\
        --transfer-security plaintext-trusted-network --require-transport rdma
    """
    from deploy.role import run_role

    run_role("prefill", settings)


@app.command()
@takes_settings(*_WORKER_OPTIONS, "landing_slots")
def decode(settings: Settings) -> None:
    """Start a decode worker: it takes KV caches over and streams the tokens.

    \b
    Example:
      baton decode --redis-url redis://10.0.0.5:6379 --host 0.0.0.0 --advertise-host 10.0.0.8 \\
        --transfer-security plaintext-trusted-network --require-transport rdma
    """
    from deploy.role import run_role

    run_role("decode", settings)


@app.command()
@takes_settings("redis_url", "cluster")
def drain(
    settings: Settings,
    worker_id: Annotated[str, typer.Argument(help="as it is registered", show_default=False)] = "",
    url: Annotated[str, typer.Option(help="the worker's HOST:PORT, instead of its id and the Redis")] = "",
    grace: Annotated[float | None, typer.Option(help="seconds for what runs [its shutdown_grace_s]")] = None,
    wait: Annotated[bool, typer.Option(help="return when the worker is gone")] = True,
) -> None:
    """Take a worker out of service: no new work, running requests end or go on elsewhere, then it exits with 0.

    \b
    Examples:
      baton drain decode-0 --redis-url redis://10.0.0.5:6379
      baton drain --url 10.0.0.8:7000 --grace 60
    """
    import asyncio

    from deploy.drain import drain_worker

    asyncio.run(drain_worker(settings, worker_id, url, grace, wait=wait))


@model_app.callback(invoke_without_command=True)
def model(context: typer.Context) -> None:
    """Models on this machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@model_app.command()
@takes_settings("model")
def fetch(settings: Settings) -> None:
    """Fetch the default model now, rather than at the first start, and print its folder; or, where the settings name
    a model, see that it is there.

    \b
    Example:
      baton model fetch
    """
    from rich.console import Console

    from deploy.model_folder import resolve_model
    from deploy.startup_display import StartupDisplay

    with StartupDisplay(Console(stderr=True)) as display:
        folder = resolve_model(settings.model, lambda line: display.say("model", line))
    typer.echo(str(folder))


@app.command("check-config")
@takes_settings()
def check_config(
    settings: Resolved,
    markdown: Annotated[bool, typer.Option("--markdown", help="print docs/SETTINGS.md instead")] = False,
) -> None:
    """Print the settings in force, as TOML, and where each value is from. Secrets are hidden.

    \b
    Examples:
      baton check-config
      BATON_PORT=9000 baton check-config --config baton.toml --set max_running=16
    """
    from deploy import settings_text

    typer.echo(settings_text.markdown().rstrip() if markdown else settings_text.effective(settings))


@app.command()
def version() -> None:
    """Print the version.

    \b
    Example:
      baton version
    """
    typer.echo(importlib.metadata.version("baton"))


def main() -> None:
    """The console script. Whatever a user can mend is one line on stderr and exit code 2."""
    if sys.argv[1:2] in ([], ["bench"], ["--help"]):  # the other commands don't pay for its imports
        from loadtest.cli import app as bench_app

        app.add_typer(bench_app, name="bench")
    try:
        code = app(standalone_mode=False)
    except StartupError as error:
        typer.echo(f"baton: {error}", err=True)
        code = error.exit_code
    except TyperException as error:
        typer.echo(f"baton: {error.format_message().rstrip('.')}; see `baton --help`", err=True)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
