"""What the hand-over from prefill to decode adds to the time from a request to its second token.

    python -m loadtest.bench_overlap --model DIR [--rounds 7] [--output FILE.json]

Two clusters run side by side and are asked in turns, one request at a time: one prefill and one decode worker, and
a single worker that computes both phases (`--prefill 0`), where nothing is transferred. The first token comes
from the prefill worker, and waits for no transfer; the second is the first that needs all KV on the other side. A
second turn of a chat follows each prompt: it sends what the decode worker lacks, and its gap between first and second
token is what handing over costs when there is hardly anything to send.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table

from loadtest.errors import BenchError
from loadtest.peers.servers import baton
from loadtest.performance import running
from loadtest.report.machine import describe_machine

SCHEMA: Final = "baton.bench.overlap/1"
VOCABULARY: Final = 49_000
PROMPT_TOKENS: Final = (1024, 4096)
ANSWER_TOKENS: Final = 32
NEXT_QUESTION_TOKENS: Final = 32
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from sending the request; token_ids: all of the answer."""

    first_s: float
    second_s: float
    token_ids: list[int]

    @property
    def gap_s(self) -> float:
        """From the first token to the second."""
        return self.second_s - self.first_s


class Cluster:
    """A running `baton serve`, by its URL."""

    def __init__(self, url: str, model: str) -> None:
        self._netloc = urlsplit(url).netloc
        self._url = url
        self._model = model

    def ask(self, prompt: Sequence[int]) -> Answer:
        """One streamed completion, on a connection that is open before the clock starts. Raises BenchError."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
        connection = http.client.HTTPConnection(self._netloc, timeout=TIMEOUT_S)
        try:
            connection.connect()
            start = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BenchError(f"{self._url} answered {response.status}: {response.read(200)!r}")
            return _read(response, start)
        finally:
            connection.close()

    def moved(self) -> tuple[float, float, float]:
        """Bytes, seconds and number of the transfers of all requests so far."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=TIMEOUT_S) as page:
            text = page.read().decode()
        names = ("baton_transfer_bytes_total", "baton_transfer_seconds_sum", "baton_transfer_seconds_count")
        sums = [sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))) for name in names]
        return sums[0], sums[1], sums[2]


def _read(response: http.client.HTTPResponse, start: float) -> Answer:
    at: list[float] = []
    token_ids: list[int] = []
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line[6:]).get("choices")
        if choices and (fresh := choices[0].get("token_ids")):
            at += [time.perf_counter() - start] * len(fresh)
            token_ids += fresh
    if len(token_ids) < ANSWER_TOKENS:
        raise BenchError(f"an answer of {len(token_ids)} tokens, {ANSWER_TOKENS} were asked for")
    return Answer(at[0], at[1], token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt's times in both clusters, what its transfer moved, and the same of a second turn of the chat."""

    two: Answer
    one: Answer
    two_again: Answer
    one_again: Answer
    transfer_s: float
    first_turn_bytes: float
    second_turn_bytes: float


def one_turn(two: Cluster, one: Cluster, num_tokens: int, rng: random.Random, *, two_first: bool) -> Turn:
    prompt = [rng.randrange(VOCABULARY) for _ in range(num_tokens)]
    before = two.moved()
    order = (two, one) if two_first else (one, two)
    answers = {cluster: cluster.ask(prompt) for cluster in order}
    between = two.moved()
    question = [rng.randrange(VOCABULARY) for _ in range(NEXT_QUESTION_TOKENS)]
    again = {cluster: cluster.ask([*prompt, *answers[cluster].token_ids, *question]) for cluster in order}
    after = two.moved()
    moved = (between[1] - before[1], between[0] - before[0], after[0] - between[0])
    return Turn(answers[two], answers[one], again[two], again[one], *moved)


def summarise(num_tokens: int, turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians; added: of the pairs' differences, which a machine that drifts between rounds does not change."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    alone = median([turn.one.second_s for turn in turns])
    added = median([turn.two.second_s - turn.one.second_s for turn in turns])
    return {
        "prompt_tokens": num_tokens,
        "turns": len(turns),
        "first_token_ms": {
            "one_worker": 1e3 * median([turn.one.first_s for turn in turns]),
            "transferred": 1e3 * median([turn.two.first_s for turn in turns]),
        },
        "second_token_ms": {
            "one_worker": 1e3 * alone,
            "transferred": 1e3 * median([turn.two.second_s for turn in turns]),
        },
        "added_to_second_token": added / alone,
        "between_tokens_ms": {
            "one_worker": 1e3 * median([turn.one.gap_s for turn in turns]),
            "transferred": 1e3 * median([turn.two.gap_s for turn in turns]),
        },
        "between_tokens_of_second_turn_ms": {
            "one_worker": 1e3 * median([turn.one_again.gap_s for turn in turns]),
            "transferred": 1e3 * median([turn.two_again.gap_s for turn in turns]),
        },
        "added_between_tokens": median([turn.two.gap_s - turn.one.gap_s for turn in turns]) / alone,
        "transfer_ms": 1e3 * median([turn.transfer_s for turn in turns]),
        "first_turn_mib": median([turn.first_turn_bytes for turn in turns]) / 2**20,
        "second_turn_mib": median([turn.second_turn_bytes for turn in turns]) / 2**20,
        "same_tokens": all(turn.two.token_ids == turn.one.token_ids for turn in turns),
    }


def main(
    model: Annotated[Path, typer.Option(help="the model's directory")],
    rounds: Annotated[int, typer.Option(help="prompts of each length, after one that is not counted")] = 5,
    only: Annotated[int, typer.Option(help="only prompts of so many tokens")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="also write JSON", metavar="FILE")] = None,
) -> None:
    """Measure what KV transfer adds to the time to the second token, and what a second chat turn sends."""
    rng = random.Random(1)
    rows = []
    remote = ("--prefill", "1", "--decode", "1", "--set", "local_prefill_max_tokens=0")
    with tempfile.TemporaryDirectory() as folder:
        two_log, one_log = Path(folder) / "two.log", Path(folder) / "one.log"
        with (
            running(baton(model, "Baton", *remote), two_log) as (two_url, _, _),
            running(baton(model, "one worker", "--prefill", "0"), one_log) as (one_url, _, _),
        ):
            two, one = Cluster(two_url, model.name), Cluster(one_url, model.name)
            for num_tokens in [length for length in PROMPT_TOKENS if only in (0, length)]:
                turns = [one_turn(two, one, num_tokens, rng, two_first=i % 2 == 0) for i in range(rounds + 1)]
                rows.append(summarise(num_tokens, turns[1:]))
    Console(width=120).print(_table(rows))
    report = {"schema": SCHEMA, "machine": describe_machine(), "rows": rows}
    if output is not None:
        output.write_text(json.dumps(report, indent=1))


def _table(rows: list[dict[str, Any]]) -> Table:
    """One column a prompt length."""
    table = Table("", *(f"{row['prompt_tokens']} tokens" for row in rows))
    for key, title in (
        ("first_token_ms", "first token, ms"),
        ("second_token_ms", "second token, ms"),
        ("between_tokens_ms", "first to second, ms"),
        ("between_tokens_of_second_turn_ms", "the same of the second turn, ms"),
    ):
        for where in ("one_worker", "transferred"):
            table.add_row(f"{title}, {where.replace('_', ' ')}", *(f"{row[key][where]:.1f}" for row in rows))
    table.add_row("added to the second token", *(f"{row['added_to_second_token']:+.1%}" for row in rows))
    table.add_row("  of it between first and second", *(f"{row['added_between_tokens']:+.1%}" for row in rows))
    table.add_row("transfer, first block to commit, ms", *(f"{row['transfer_ms']:.1f}" for row in rows))
    table.add_row("sent in the first turn, MiB", *(f"{row['first_turn_mib']:.2f}" for row in rows))
    table.add_row("sent in the second turn, MiB", *(f"{row['second_turn_mib']:.2f}" for row in rows))
    table.add_row("same tokens in both", *(str(row["same_tokens"]) for row in rows))
    return table


if __name__ == "__main__":
    typer.run(main)
