"""`baton serve` from the checks to the last process's end."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console

from common.config import Settings
from common.errors import StartupError
from common.tasks import end_task
from deploy import preflight
from deploy.cluster_plan import Part, effective_auth, memory_need, plan_parts
from deploy.first_answer import AnswerError, ask
from deploy.local_cluster import READY_DEADLINE_S, EmbeddedRedisPart, LocalCluster, probe_host
from deploy.model_folder import ModelFacts, check_model, resolve_model
from deploy.paths import run_directory
from deploy.restart_policy import RestartPolicy
from deploy.startup_display import StartupDisplay
from deploy.supervisor import GaveUpError

EXIT_INTERRUPTED_TWICE: Final = 130


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known before anything starts. started: time.monotonic() of the command's begin."""

    settings: Settings
    model: ModelFacts
    port: int
    grpc_port: int
    demo: bool
    started: float

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.model.folder.name


def serve(settings: Settings, *, demo: bool) -> int:
    """Run a local cluster until a signal. Returns the exit code. Raises StartupError where it can't be kept up."""
    console = Console(highlight=False)
    previous = signal.signal(signal.SIGTERM, _raise_interrupt)  # until the event loop takes the signals over
    try:
        prepared = prepare(settings, console, demo=demo)
        with run_directory() as run_dir:
            return asyncio.run(_run(prepared, run_dir, console))
    except GaveUpError as error:
        for line in error.log_tail:
            Console(stderr=True, highlight=False).print(f"  {line}", style="dim", markup=False, soft_wrap=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def prepare(settings: Settings, console: Console, *, demo: bool) -> Prepared:
    """Check ports, model and memory; fetch the default model where none is named. Raises StartupError."""
    started = time.monotonic()
    port = preflight.check_port(settings.host, settings.port, "--port")
    check_auth(settings)
    grpc_port = preflight.choose_grpc_port(settings.host, settings.grpc_port, port)
    if redis_url := settings.redis_url.get_secret_value():
        preflight.check_redis(redis_url)
    with StartupDisplay(console) as display:
        folder = resolve_model(settings.model, lambda line: display.say("model", line))
        model = check_model(folder, settings.dtype)
        display.say("model", str(folder), done=True)
        display.say("kernels", preflight.compiler_note(settings.kernels), done=True)
    need = memory_need(settings, weights_file_bytes=model.weights_file_bytes, file_dtype=model.stored_dtype)
    preflight.check_memory(need, preflight.available_memory_bytes())
    return Prepared(settings, model, port, grpc_port, demo, started)


def check_auth(settings: Settings) -> None:
    """Raises StartupError where keys are asked for that nobody could make: the embedded Redis is nobody else's."""
    shared = settings.tenants_file or settings.redis_url.get_secret_value()
    if effective_auth(settings) == "keys" and not shared:
        raise StartupError(
            f"on {settings.host} only tenants with keys are served: name a --set tenants_file=FILE for "
            "`baton tenant create`, or let everybody in with --set auth=anonymous"
        )


async def _run(prepared: Prepared, run_dir: Path, console: Console) -> int:
    """Bring the cluster up, keep it until `end`, bring it down. `end`: a result when asked to stop, else a failure."""
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    policy = RestartPolicy(watchdog_s=prepared.settings.watchdog_s)

    def on_give_up(error: GaveUpError) -> None:
        if not end.done():
            end.set_exception(error)

    redis_url = prepared.settings.redis_url.get_secret_value()
    redis = None if redis_url else EmbeddedRedisPart(run_dir, policy, on_give_up)
    cluster = LocalCluster(_parts(prepared, redis.url if redis else redis_url), run_dir, policy, on_give_up)
    signals = _Signals(end, cluster, console)
    up = asyncio.create_task(_bring_up(prepared, cluster, redis, run_dir, console))
    try:
        await asyncio.wait({up, end}, return_when=asyncio.FIRST_COMPLETED)
        if up.done() and not end.done():
            up.result()
        await end
    finally:
        up.cancel()  # ended below, when the parts that its requests wait for are gone
        await cluster.stop(prepared.settings.shutdown_grace_s)
        if redis:
            await redis.stop()
        await end_task(up)
        signals.close()
    return EXIT_INTERRUPTED_TWICE if signals.count > 1 else 0


class _Signals:
    """The first asks for an orderly end, the second kills what still runs."""

    HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, end: asyncio.Future[None], cluster: LocalCluster, console: Console) -> None:
        self.count = 0
        self._end = end
        self._cluster = cluster
        self._console = console
        self._loop = asyncio.get_running_loop()
        for number in self.HANDLED:
            self._loop.add_signal_handler(number, self._received)

    def close(self) -> None:
        for number in self.HANDLED:
            self._loop.remove_signal_handler(number)

    def _received(self) -> None:
        self.count += 1
        if self.count > 1:
            self._cluster.kill()
            return
        self._console.print("\nstopping: running requests may finish; once more to stop at once")
        if not self._end.done():
            self._end.set_result(None)


def _parts(prepared: Prepared, redis_url: str) -> list[Part]:
    shared = bool(prepared.settings.redis_url.get_secret_value())
    return plan_parts(
        prepared.settings,
        redis_url=redis_url,
        model=str(prepared.model.folder),
        port=prepared.port,
        grpc_port=prepared.grpc_port,
        num_cores=preflight.num_cores(),
        suffix=f"-{secrets.token_hex(3)}" if shared else "",
    )


async def _bring_up(
    prepared: Prepared, cluster: LocalCluster, redis: EmbeddedRedisPart | None, run_dir: Path, console: Console
) -> None:
    if redis:
        await redis.start()
    cluster.start()
    with StartupDisplay(console) as display:
        try:
            await cluster.ready(lambda part, doing, done: display.say(part, doing, done=done))
        except TimeoutError:
            message = f"not ready after {READY_DEADLINE_S:.0f} s: see the logs in {run_dir}"
            raise StartupError(message, exit_code=1) from None
    _say_ready(prepared, run_dir, console)
    if prepared.demo and effective_auth(prepared.settings) == "anonymous":
        await _show_answer(prepared, console)
    console.print("\nCtrl-C stops everything.")


def _say_ready(prepared: Prepared, run_dir: Path, console: Console) -> None:
    host = preflight.browsable(prepared.settings.host)
    url = f"http://{host}:{prepared.port}"
    body = {
        "model": prepared.model_name,
        "messages": [{"role": "user", "content": "Who invented the relay race?"}],
        "stream": True,
    }
    workers = f"{prepared.settings.prefill} prefill, {prepared.settings.decode} decode"
    console.print(f"\n[bold green]Baton is ready[/] after {time.monotonic() - prepared.started:.1f} s ({workers})")
    lines = {"URL": url, "gRPC": f"{host}:{prepared.grpc_port}", "model": prepared.model_name, "logs": str(run_dir)}
    for label, value in lines.items():
        console.print(f"  {label:<6}{value}", markup=False, soft_wrap=True)
    keyed = effective_auth(prepared.settings) == "keys"
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    if keyed:
        console.print("\nKeys: `baton tenant create NAME` makes one", markup=False)
    curl = (
        f"  curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"
    )
    console.print(f"\nTry it:\n{curl}", markup=False, soft_wrap=True)


async def _show_answer(prepared: Prepared, console: Console) -> None:
    def write(text: str) -> None:
        console.print(text, end="", markup=False, soft_wrap=True)

    console.print("\nA first answer, streamed:")
    host = probe_host(prepared.settings.host)
    try:
        answer = await asyncio.to_thread(ask, host, prepared.port, prepared.model_name, write)
    except AnswerError as error:
        console.print(f"\nno answer: {error}", style="red", markup=False)
        return
    rate = (answer.num_tokens - 1) / max(answer.total_s - answer.ttft_s, 1e-9)
    console.print(
        f"\n({answer.num_tokens} tokens; first after {answer.ttft_s * 1000:.0f} ms, then {rate:.0f} tokens/s)",
        style="dim",
    )


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
