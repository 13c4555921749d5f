"""One run from its options to its result: reach the server, plan, run, show progress, close everything."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from rich.console import Console

from loadtest.client.grpc_stream import GrpcTarget
from loadtest.client.openai import OpenAITarget
from loadtest.client.target import GenerationOptions, Target, TargetInfo
from loadtest.errors import BenchError
from loadtest.gauges import GaugeSampler
from loadtest.monitor import ClientLimits
from loadtest.progress import ProgressTally, show_progress
from loadtest.prompts import PromptForm, PromptMaker, TextOf, text_maker
from loadtest.record import RequestRecord
from loadtest.report.run_report import RunContext
from loadtest.runner import LoadRun, RunLimits, RunResult
from loadtest.slo import Slo
from loadtest.streams import StreamSpec, check_streams
from loadtest.tokens import TokenSource

# Most vocabularies hold their special ids below this.
_LOWEST_ID: Final = 100
_WATCH_PERIOD_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """
    api: completions or chat (also over gRPC). prompt: ids or text, for completions. metrics_url: "" is the server's
    /metrics, "none" is off. max_model_len: 0 is what the server tells.
    """

    url: str
    streams: Sequence[StreamSpec]
    limits: RunLimits
    api: Literal["completions", "chat"] = "completions"
    prompt: Literal["ids", "text"] = "ids"
    api_key: str = ""
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    seed: int = 0
    warmup_s: float = 0.0
    slo: Slo | None = None
    vocab_size: int = 32_000
    tokenizer: Path | None = None
    max_model_len: int = 0
    metrics_url: str = ""
    client_limits: ClientLimits = field(default_factory=ClientLimits)
    command: str = ""

    def __post_init__(self) -> None:
        check_streams(self.streams)
        if self.warmup_s < 0:
            raise BenchError(f"--warmup must not be below 0 s, not {self.warmup_s:g}")
        if self.limits.duration_s is not None and self.warmup_s >= self.limits.duration_s:
            raise BenchError(f"--warmup {self.warmup_s:g} s leaves nothing of --duration {self.limits.duration_s:g} s")

    @property
    def form(self) -> PromptForm:
        return "messages" if self.api == "chat" else self.prompt


class Bench:
    """A reached server, ready for one run after another. Made by open_bench, which closes its target."""

    def __init__(
        self, options: BenchOptions, target: Target, info: TargetInfo, text_of: TextOf, console: Console | None
    ) -> None:
        self.options = options
        self.target = target
        self.info = info
        self._text_of = text_of
        self._console = console

    async def run(
        self,
        streams: Sequence[StreamSpec],
        limits: RunLimits,
        *,
        seed: int,
        watch: Callable[[LoadRun], None] | None = None,
        on_done: Callable[[RequestRecord], None] | None = None,
    ) -> RunResult:
        """One run. watch: called twice a second with the run, which it may stop. Ctrl-C stops it, with its report."""
        tally = ProgressTally()

        def done(record: RequestRecord) -> None:
            tally.done(record)
            if on_done is not None:
                on_done(record)

        sampler = self._sampler()
        run = LoadRun(
            self.target,
            self._with_keys(streams),
            self._maker(seed),
            limits,
            seed=seed,
            gauges=sampler,
            on_done=done,
        )
        helpers: list[asyncio.Task[None]] = []
        if watch is not None:
            helpers.append(asyncio.create_task(_watch(run, watch)))
        if self._console is not None:
            series = sampler.series if sampler is not None else None
            helpers.append(asyncio.create_task(show_progress(run, tally, series, self._console)))
        try:
            with _stopped_by_ctrl_c(run):
                return await run.run()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    def context(self, streams: Sequence[StreamSpec], limits: RunLimits, seed: int) -> RunContext:
        options = self.options
        return RunContext(
            target=self.info,
            streams=streams,
            limits=limits,
            seed=seed,
            command=options.command,
            warmup_s=options.warmup_s,
            slo=options.slo,
            client_limits=options.client_limits,
        )

    async def server_is_idle(self) -> bool | None:
        """Whether the server's gauges show nothing running or waiting; None where it shows none."""
        sampler = self._sampler()
        if sampler is None:
            return None
        try:
            gauges = await sampler.sample()
        finally:
            sampler.close()
        if "running" not in gauges:
            return None
        return gauges["running"] + gauges.get("waiting", 0.0) == 0

    def _maker(self, seed: int) -> PromptMaker:
        options = self.options
        low = min(_LOWEST_ID, options.vocab_size // 8)
        source = TokenSource(seed, low=low, high=options.vocab_size)
        return PromptMaker(options.form, self._text_of, source, options.max_model_len or self.info.max_model_len)

    def _sampler(self) -> GaugeSampler | None:
        url = self.options.metrics_url
        if not url and isinstance(self.target, OpenAITarget):
            url = f"http://{self.target.address.host_header}{self.target.prefix}/metrics"
        return GaugeSampler(url) if url not in ("", "none") else None

    def _with_keys(self, streams: Sequence[StreamSpec]) -> list[StreamSpec]:
        """Streams without a key of their own use the run's."""
        return [s if s.api_key else dataclasses.replace(s, api_key=self.options.api_key) for s in streams]


@contextlib.asynccontextmanager
async def open_bench(options: BenchOptions, console: Console | None = None) -> AsyncIterator[Bench]:
    """Reach the server; the target is closed at the end. console: where progress goes, None is nowhere.

    Raises BenchError when there is no server, or when it serves no model.
    """
    text_of = text_maker(options.tokenizer if options.form != "ids" else None)
    target: Target
    if options.url.startswith("grpc://"):
        target = GrpcTarget(options.url, options.generation, api_key=options.api_key)
    else:
        target = OpenAITarget(options.url, options.api, options.generation, api_key=options.api_key)
    try:
        yield Bench(options, target, await target.open(), text_of, console)
    finally:
        await target.close()


async def _watch(run: LoadRun, watch: Callable[[LoadRun], None]) -> None:
    while True:
        await asyncio.sleep(_WATCH_PERIOD_S)
        watch(run)


@contextlib.contextmanager
def _stopped_by_ctrl_c(run: LoadRun) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, run.stop, "interrupted (Ctrl-C)")
    except (RuntimeError, ValueError):
        # Not in the main thread: whoever runs the loop handles signals.
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
