"""How many token events a second one core of the load generator takes: `python -m loadtest.bench_client`.

A second process sends one server-sent event a stream and tick, each in a write of its own and with its time of sending
inside, so the table also tells how late the client stamps an event. The rate is doubled until the client falls behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
from typing import Final

import numpy as np
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.client.openai import OpenAITarget
from loadtest.client.target import GenerationOptions, Send
from loadtest.prompts import Prompt, PromptMaker, words_of
from loadtest.record import RequestRecord
from loadtest.runner import LoadRun, RunLimits
from loadtest.streams import StreamSpec, parse_stream
from loadtest.tokens import TokenSource

# Kept up: nearly all events came in time, most were stamped at once, and the core was not full. The 99th percentile is
# shown, but on a shared machine it tells of the neighbours.
_LEAST_SHARE: Final = 0.98
_MOST_DELAY_S: Final = 0.001
_MOST_CORES: Final = 0.9
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT: Final = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"blast",'
    b'"choices":[{"index":0,"text":"%.9f","logprobs":null,"finish_reason":%s}],"usage":null}\n\n'
)


def serve(num_streams: int, rate: float) -> None:
    """The blaster: waits for one request on each of num_streams connections, then sends `rate` events a second."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sockets: list[socket.socket] = []
    num_events = 0
    while len(sockets) < num_streams:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        num_events = _read_request(connection)
        connection.sendall(_HEAD)
        sockets.append(connection)
    start = time.perf_counter() + 0.2
    for index in range(num_events):
        reason = b'"length"' if index == num_events - 1 else b"null"
        for slot, connection in enumerate(sockets):
            due = start + (index * num_streams + slot) / rate
            # Sleeping costs 60 µs; events due within that leave back to back.
            if (early := due - time.perf_counter()) > 1e-4:
                time.sleep(early)
            event = _EVENT % (time.perf_counter(), reason)
            connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))
    for connection in sockets:
        connection.sendall(b"0\r\n\r\n")
    sys.stdin.read()


def _read_request(connection: socket.socket) -> int:
    """max_tokens of the one request."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(65536)
    return int(orjson.loads(body)["max_tokens"])


class _StampTarget(OpenAITarget):
    """Keeps each answer's text: the times of sending."""

    def prepare(self, stream: StreamSpec, prompt: Prompt, max_tokens: int, *, keep_answer: bool) -> Send:
        plain = super().prepare(stream, prompt, max_tokens, keep_answer=keep_answer)

        async def send(record: RequestRecord) -> None:
            record.keep_answer = True
            await plain(record)

        return send


async def measure(port: int, num_streams: int, events_each: int) -> tuple[list[RequestRecord], float]:
    """All records and the CPU seconds that the client spent."""
    target = _StampTarget(f"http://127.0.0.1:{port}", "completions", GenerationOptions(model="blast"))
    maker = PromptMaker("ids", words_of, TokenSource(0))
    stream = parse_stream(f"name=blast concurrency={num_streams} workload=fixed:input=16,output={events_each}")
    run = LoadRun(target, [stream], maker, RunLimits(requests=num_streams, timeout_s=120))
    cpu_start = time.process_time()
    try:
        result = await run.run()
    finally:
        await target.close()
    return result.records, time.process_time() - cpu_start


def probe(num_streams: int, rate: float, seconds: float) -> dict[str, float]:
    """One rate: events/s received, client cores used, median and 99th percentile of the stamp's delay in seconds."""
    command = [sys.executable, "-m", "loadtest.bench_client", "--serve", "--streams", str(num_streams)]
    server = subprocess.Popen([*command, "--rate", str(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        port = int(server.stdout.readline()) if server.stdout else 0
        events_each = max(2, round(rate * seconds / num_streams))
        records, cpu_s = uvloop.run(measure(port, num_streams, events_each))
    finally:
        if server.stdin:
            server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(5)
        server.kill()
    failures = {r.failure_detail for r in records if not r.ok}
    if failures:
        raise RuntimeError(f"requests failed: {failures}")
    stamped = np.concatenate([np.asarray(r.events_s) for r in records])
    sent = np.array([float(text) for r in records for text in r.answer_text])
    span = float(stamped.max() - stamped.min())
    delay = np.percentile(stamped - sent, [50, 99])
    return {
        "events_per_s": len(stamped) / span,
        "cores": cpu_s / span,
        "us_per_event": cpu_s / len(stamped) * 1e6,
        "delay_p50_s": float(delay[0]),
        "delay_p99_s": float(delay[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256, help="connections that stream at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one step")
    parser.add_argument("--rate", type=float, default=5000.0, help="first rate, events/s")
    parser.add_argument("--max-rate", type=float, default=80_000.0, help="last rate, events/s")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.streams, args.rate)
        return
    table = Table("offered events/s", "received events/s", "client cores", "CPU µs/event", "stamp delay p50", "p99")
    best, rate = 0.0, args.rate
    while rate <= args.max_rate:
        result = probe(args.streams, rate, args.seconds)
        table.add_row(
            f"{rate:,.0f}",
            f"{result['events_per_s']:,.0f}",
            f"{result['cores']:.2f}",
            f"{result['us_per_event']:.1f}",
            f"{result['delay_p50_s'] * 1e3:.2f} ms",
            f"{result['delay_p99_s'] * 1e3:.2f} ms",
        )
        in_time = result["events_per_s"] > _LEAST_SHARE * rate and result["delay_p50_s"] < _MOST_DELAY_S
        if not (in_time and result["cores"] < _MOST_CORES):
            break
        best, rate = rate, rate * 2
    console = Console()
    console.print(table)
    console.print(
        f"{args.streams} streams, {os.cpu_count()} cores: the client kept up with {best:,.0f} events/s on one core"
        f" ({_LEAST_SHARE:.0%} of the offered rate received, half of the events stamped within"
        f" {_MOST_DELAY_S * 1e3:.0f} ms, less than {_MOST_CORES:.0%} of the core used)"
    )


if __name__ == "__main__":
    main()
