"""Far more than the cluster can do: all get a result or are told to come later, and then it is as before."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil
import pytest

from loadtest.answers import Answer, stream_completion
from loadtest.fleet import Fleet
from tests.fault.cluster import PROMPT, assert_settles, fleet_of
from tests.tiny_model import make_tiny_model

REFUSALS = {"http 429", "http 503", "http 504", "deadline_exceeded", "overloaded"}
BODY = {"max_tokens": 6, "ignore_eos": True, "temperature": 0, "timeout": 30}
MORE_BYTES = 256 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[tuple[Fleet, str]]:
    folder = tmp_path_factory.mktemp("overload")
    model = make_tiny_model(folder / "model")
    with fleet_of(folder, model, prefill=1, decode=1, max_waiting=400) as made:
        yield made


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=httpx.Timeout(60, pool=None), limits=limits)


def rss(fleet: Fleet) -> dict[str, int]:
    return {name: psutil.Process(part.pid).memory_info().rss for name, part in fleet.parts.items()}


def assert_as_before(fleet: Fleet, url: str, before: dict[str, int]) -> None:
    """Idle, no larger than before, and answering."""
    assert_settles(fleet)
    grown = {name: now - before[name] for name, now in rss(fleet).items() if now - before[name] > MORE_BYTES}
    assert grown == {}
    after = asyncio.run(ask_one(url))
    assert after.failure == ""


async def ask_one(url: str) -> Answer:
    async with client() as http:
        return await stream_completion(http, url, {**BODY, "prompt": PROMPT})


def test_a_thousand_at_once_all_end_with_a_result_or_a_refusal(made):
    fleet, url = made
    before = rss(fleet)

    async def all_at_once() -> list[Answer]:
        async with client() as http:
            bodies = [{**BODY, "prompt": [*PROMPT, i % 250 + 3, i // 250 + 3]} for i in range(1000)]
            return await asyncio.gather(*(stream_completion(http, url, body) for body in bodies))

    outcomes = Counter(answer.failure or "whole" for answer in asyncio.run(all_at_once()))
    assert set(outcomes) <= REFUSALS | {"whole"}, outcomes
    assert outcomes["whole"] >= 300, outcomes
    assert outcomes.total() == 1000
    assert_as_before(fleet, url, before)


def test_slow_readers_and_leavers_hold_up_nobody_and_leave_nothing(made):
    """Some read an event and pause, some leave at a random moment, and the rest is quick."""
    fleet, url = made
    before = rss(fleet)
    chance = random.Random(4)

    async def slow(http: httpx.AsyncClient, done: asyncio.Event) -> Answer:
        async def pause(_: Answer) -> None:
            if not done.is_set():
                await asyncio.wait({asyncio.create_task(done.wait())}, timeout=1.0)

        return await stream_completion(http, url, {**BODY, "prompt": PROMPT, "max_tokens": 200}, pause)

    async def leave(http: httpx.AsyncClient, after: int) -> None:
        left = after

        async def count(_: Answer) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise ConnectionAbortedError

        try:
            await stream_completion(http, url, {**BODY, "prompt": PROMPT[::-1], "max_tokens": 60}, count)
        except ConnectionAbortedError:
            return

    async def mixed() -> tuple[list[Answer], list[Answer]]:
        async with client() as http:
            done = asyncio.Event()
            slow_ones = [asyncio.create_task(slow(http, done)) for _ in range(10)]
            leavers = [asyncio.create_task(leave(http, chance.randrange(10))) for _ in range(60)]
            quick = await asyncio.gather(
                *(stream_completion(http, url, {**BODY, "prompt": [*PROMPT, i + 3]}) for i in range(60))
            )
            assert not any(task.done() for task in slow_ones), "the quick ones waited for the slow ones"
            done.set()
            await asyncio.gather(*leavers)
            return quick, await asyncio.gather(*slow_ones)

    quick, slow_ones = asyncio.run(mixed())
    assert {answer.failure for answer in quick} == {""}
    assert {answer.failure for answer in slow_ones} == {""}
    assert len({str(answer.content) for answer in slow_ones}) == 1, "every token once, in order"
    assert_as_before(fleet, url, before)


def test_ten_times_the_sustainable_rate_is_answered_or_refused(made):
    fleet, url = made
    before = rss(fleet)
    body = {**BODY, "prompt": PROMPT * 8, "max_tokens": 30, "timeout": 4}

    async def flood(rate: float, number: int) -> list[Answer]:
        """Open loop: nobody waits for anybody's answer."""
        async with client() as http:
            loop = asyncio.get_running_loop()
            start, tasks = loop.time(), []
            for i in range(number):
                await asyncio.sleep(max(0.0, start + i / rate - loop.time()))
                one = {**body, "prompt": [*body["prompt"], i % 250 + 3, i // 250 + 3]}
                tasks.append(asyncio.create_task(stream_completion(http, url, one)))
            return await asyncio.gather(*tasks)

    async def sustained_rate() -> float:
        loop = asyncio.get_running_loop()
        async with client() as http:
            began = loop.time()
            await asyncio.gather(*(stream_completion(http, url, {**body, "timeout": 30}) for _ in range(60)))
            return 60 / (loop.time() - began)

    rate = 10 * asyncio.run(sustained_rate())
    outcomes = Counter(answer.failure or "whole" for answer in asyncio.run(flood(rate, 900)))
    assert set(outcomes) <= REFUSALS | {"whole"}, outcomes
    assert outcomes["whole"], outcomes
    assert_as_before(fleet, url, before)
