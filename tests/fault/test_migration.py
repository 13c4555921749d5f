"""Workers die, stop or break in mid-stream, as processes: every stream reads as if nothing had happened."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from loadtest.answers import Answer
from loadtest.fleet import Fleet
from tests.fault.cluster import (
    PROMPT,
    SLOW,
    all_streams,
    assert_settles,
    bodies,
    busiest,
    fleet_of,
    with_stop_string,
)
from tests.fault.faulty_worker import KILLER
from tests.tiny_model import make_tiny_model

MAX_TOKENS = 160


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[tuple[Fleet, str]]:
    folder = tmp_path_factory.mktemp("migration")
    model = make_tiny_model(folder / "model", **SLOW)
    with fleet_of(folder, model, prefill=2, decode=2, module="tests.fault.faulty_worker") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def undisturbed(made) -> tuple[dict[str, dict], dict[str, Answer]]:
    """What to ask, and what comes."""
    _, url = made
    asked = bodies(MAX_TOKENS)
    first = asyncio.run(all_streams(url, asked))
    asked["stop string"] = with_stop_string(first["greedy"], asked["greedy"])
    return asked, asyncio.run(all_streams(url, asked))


@pytest.fixture
def fleet(made) -> Iterator[Fleet]:
    """Whole before and after, with nothing held by anybody."""
    fleet, _ = made
    yield fleet
    for part in fleet.parts.values():
        fleet.signal(part.name, signal.SIGCONT)
        if fleet.has_logged(part.name, "step_failed"):
            fleet.kill(part.name)
        if not part.is_up:
            fleet.start(part.name)
    fleet.wait_ready()
    assert_settles(fleet)


def same(answers: dict[str, Answer], clean: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        assert answer.failure == "", (name, answer.failure)
        assert answer.content == clean[name].content, name
        for index, choice in answer.choices.items():
            assert choice.logprobs == pytest.approx(clean[name].choices[index].logprobs, abs=1e-3), name


HOW = {
    "killed": lambda fleet, name: fleet.signal(name, signal.SIGKILL),
    "stopped": lambda fleet, name: fleet.signal(name, signal.SIGSTOP),
    "engine broken": lambda fleet, name: fleet.signal(name, signal.SIGUSR1),
}


@pytest.mark.parametrize("how", HOW)
def test_no_token_is_lost_or_repeated_when_a_decode_worker_is(made, fleet, undisturbed, how):
    asked, clean = undisturbed
    answers = asyncio.run(all_streams(made[1], asked, lambda: HOW[how](fleet, busiest(fleet, "decode"))))
    same(answers, clean)


def test_a_prefill_workers_death_costs_only_a_second_prefill(made, fleet, undisturbed):
    """It dies with the prompts of all requests at hand, while nobody has a token."""
    asked, clean = undisturbed

    async def disturbed() -> dict[str, Answer]:
        streams = asyncio.create_task(all_streams(made[1], asked))
        fleet.signal("prefill-0", signal.SIGSTOP)
        await asyncio.sleep(0)
        fleet.signal("prefill-0", signal.SIGKILL)
        return await streams

    same(asyncio.run(disturbed()), clean)


def test_without_any_prefill_worker_decode_workers_compute_prompts(made, fleet, undisturbed):
    asked, clean = undisturbed
    for name in fleet.workers("prefill"):
        fleet.kill(name)
    same(asyncio.run(all_streams(made[1], asked)), clean)


def test_without_any_decode_worker_requests_wait_for_one_to_come_back(made, fleet, undisturbed):
    asked, clean = undisturbed

    def end_all() -> None:
        for name in fleet.workers("decode"):
            fleet.kill(name)
        fleet.start("decode-1")

    same(asyncio.run(all_streams(made[1], asked, end_all)), clean)


def test_a_request_that_kills_its_workers_fails_and_takes_nobody_with_it(made, fleet, undisturbed):
    asked, clean = undisturbed
    deadly = {"prompt": [*PROMPT, *KILLER, 5], "max_tokens": 40, "timeout": 60}

    async def both() -> tuple[dict[str, Answer], dict[str, Answer]]:
        peers = asyncio.create_task(all_streams(made[1], asked))
        return await all_streams(made[1], {"deadly": deadly}), await peers

    poisoned, peers = asyncio.run(both())
    assert poisoned["deadly"].failure in ("http 500", "internal_error")
    assert sum(not part.is_up for part in fleet.parts.values()) == 2, "it had two tries"
    same(peers, clean)
