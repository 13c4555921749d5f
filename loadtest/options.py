"""Options that `baton bench run` and `baton bench saturate` share, as dataclasses that become command-line options."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import orjson
import typer

from loadtest.bench import BenchOptions
from loadtest.client.target import GenerationOptions
from loadtest.errors import BenchError
from loadtest.monitor import ClientLimits
from loadtest.runner import RunLimits
from loadtest.slo import parse_slo
from loadtest.streams import StreamSpec, make_arrival, parse_stream
from loadtest.workloads.registry import parse_workload

_HIDDEN: Final = re.compile(r"(?<=\bkey=)\S+|(?<=Bearer )\S+")


def _option(*names: str, help: str, metavar: str | None = None) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The server, the load and what to keep of the result."""

    url: Annotated[
        str, _option("--url", help="http://host:port or grpc://host:port [http://127.0.0.1:8000]", metavar="URL")
    ] = "http://127.0.0.1:8000"
    api: Annotated[str, _option("--api", help="completions or chat [completions]", metavar="completions|chat")] = (
        "completions"
    )
    prompt: Annotated[
        str, _option("--prompt", help="completions carry token ids or text [ids]", metavar="ids|text")
    ] = "ids"
    model: Annotated[str, _option("--model", help="model name [the first one served]", metavar="NAME")] = ""
    api_key: Annotated[str, _option("--api-key", help="bearer key [OPENAI_API_KEY, if set]", metavar="KEY")] = ""
    workload: Annotated[
        str,
        _option("--workload", help="name:key=value,… ; `baton bench workloads` lists them [fixed]", metavar="SPEC"),
    ] = "fixed"
    arrival: Annotated[
        str | None,
        _option("--arrival", help="poisson, gamma, constant, trace or closed", metavar="KIND"),
    ] = None
    shape: Annotated[float, _option("--shape", help="of gamma arrivals; below 1 bursts [0.5]", metavar="X")] = 0.5
    stream: Annotated[
        list[str] | None,
        _option("--stream", help='a tenant: "name=… key=… class=… rate=… workload=…"; may be repeated', metavar="SPEC"),
    ] = None
    slo: Annotated[
        str, _option("--slo", help="objective, e.g. ttft_ms=500,itl_ms=50,e2e_ms=10000", metavar="LIMITS")
    ] = ""
    warmup: Annotated[
        float, _option("--warmup", help="seconds at the start that are not measured [0]", metavar="SECONDS")
    ] = 0.0
    timeout: Annotated[float, _option("--timeout", help="of one request [600]", metavar="SECONDS")] = 600.0
    seed: Annotated[int, _option("--seed", help="of arrivals, lengths and prompts [0]", metavar="N")] = 0
    vocab_size: Annotated[
        int, _option("--vocab-size", help="token ids of prompts are below this [32000]", metavar="N")
    ] = 32_000
    tokenizer: Annotated[
        Path | None, _option("--tokenizer", help="model folder, to make text prompts of exact length", metavar="DIR")
    ] = None
    max_model_len: Annotated[
        int, _option("--max-model-len", help="cut prompts to fit this context [as the server says]", metavar="N")
    ] = 0
    temperature: Annotated[float, _option("--temperature", help="0 is greedy [0]", metavar="X")] = 0.0
    respect_eos: Annotated[
        bool, typer.Option("--respect-eos", help="let answers end early; by default their length is fixed")
    ] = False
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="ask for token ids: exact counts where events carry several tokens")
    ] = False
    extra_body: Annotated[str, _option("--extra-body", help="JSON object merged into each request", metavar="JSON")] = (
        ""
    )
    header: Annotated[
        list[str] | None, _option("--header", help='"Name: value" of each request; may be repeated', metavar="HEADER")
    ] = None
    no_keep_alive: Annotated[bool, typer.Option("--no-keep-alive", help="a new connection for each request")] = False
    metrics_url: Annotated[
        str, _option("--metrics-url", help="server gauges are read here; none: not at all [URL/metrics]", metavar="URL")
    ] = ""
    max_lag_ms: Annotated[
        float, _option("--max-lag-ms", help="lateness of the client that makes a result invalid [25]", metavar="MS")
    ] = 25.0
    output: Annotated[
        Path | None,
        _option("--output", "-o", help="JSON file, page beside it [bench-TIME.json]", metavar="FILE"),
    ] = None
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="live figures while it runs")] = True

    def bench_options(self, streams: Sequence[StreamSpec], limits: RunLimits) -> BenchOptions:
        """Raises BenchError for a value that makes no sense."""
        return BenchOptions(
            url=self.url,
            streams=streams,
            limits=limits,
            api=_one_of("--api", self.api, ("completions", "chat")),
            prompt=_one_of("--prompt", self.prompt, ("ids", "text")),
            api_key=self.api_key or os.environ.get("OPENAI_API_KEY", ""),
            generation=GenerationOptions(
                model=self.model,
                temperature=self.temperature,
                ignore_eos=not self.respect_eos,
                token_ids=self.token_ids,
                extra_body=_json_object(self.extra_body),
                headers=[_header(h) for h in self.header or ()],
                keep_alive=not self.no_keep_alive,
                timeout_s=self.timeout,
            ),
            seed=self.seed,
            warmup_s=self.warmup,
            slo=parse_slo(self.slo) if self.slo else None,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
            metrics_url=self.metrics_url,
            client_limits=ClientLimits(max_lag_s=self.max_lag_ms / 1e3),
            command=masked_command(sys.argv),
        )

    def streams(
        self, *, rate: float | None = None, speed: float = 1.0, concurrency: int | None = None
    ) -> list[StreamSpec]:
        """The given --stream options, else one stream from --rate, --concurrency and --workload."""
        if self.stream:
            if rate is not None or concurrency is not None or self.arrival is not None:
                raise BenchError("--rate, --concurrency and --arrival go into each --stream, not beside them")
            return [parse_stream(text) for text in self.stream]
        workload = parse_workload(self.workload)
        arrival = make_arrival(
            self.arrival,
            rate=rate,
            shape=self.shape,
            speed=speed,
            concurrency=concurrency,
            replays_trace=workload.is_finite,
        )
        return [StreamSpec("default", arrival, workload)]


def takes_load_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator: replaces the parameter `load` (LoadOptions) by its options; other parameters stay as they are."""
    hints = get_type_hints(function, include_extras=True)
    fields = get_type_hints(LoadOptions, include_extras=True)
    own = [p for p in signature(function).parameters.values() if p.name != "load"]

    def command(**given: Any) -> None:
        load = LoadOptions(**{f.name: given.pop(f.name) for f in dataclasses.fields(LoadOptions)})
        function(load=load, **given)

    added = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=fields[f.name])
        for f in dataclasses.fields(LoadOptions)
    ]
    kept = [p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
    command.__signature__ = Signature([*kept, *added])  # type: ignore[attr-defined]
    return command


def masked_command(argv: Sequence[str]) -> str:
    """The command as typed, without the program's folder and without keys: it goes into reports."""
    words = [Path(argv[0]).name, *argv[1:]]
    for i, word in enumerate(words[:-1]):
        if word == "--api-key":
            words[i + 1] = "…"
    words = [re.sub(r"^--api-key=.*", "--api-key=…", _HIDDEN.sub("…", word)) for word in words]
    return shlex.join(words)


def _one_of(option: str, value: str, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise BenchError(f"{option} {value!r}: there are {', '.join(choices)}")
    return value


def _json_object(text: str) -> tuple[tuple[str, object], ...]:
    if not text:
        return ()
    try:
        value = orjson.loads(text)
    except ValueError as e:
        raise BenchError(f"--extra-body {text!r}: not JSON: {e}") from e
    if not isinstance(value, dict):
        raise BenchError(f"--extra-body {text!r}: a JSON object is expected")
    return tuple(value.items())


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or any(c in text for c in "\r\n"):
        raise BenchError(f'--header {text!r}: write it as "Name: value"')
    return name.strip(), value.strip()
