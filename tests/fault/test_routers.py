"""Two routers behind one port: the death of one is the end of its own streams, and of nothing else."""

from __future__ import annotations

import asyncio

import httpx
import psutil
import pytest

from loadtest.answers import Answer, stream_completion
from loadtest.fleet import Fleet
from tests.fault.cluster import PROMPT, SLOW, assert_settles, fleet_of
from tests.processes import becomes_true
from tests.tiny_model import make_tiny_model

NUM_STREAMS = 10
BODY = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def two_routers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routers")
    model = make_tiny_model(folder / "model", **SLOW)
    with fleet_of(folder, model, prefill=1, decode=1, routers=2, log_level="debug") as made:
        yield made


def ports_of(fleet: Fleet, name: str) -> set[int]:
    """Of the clients whose connections a router holds."""
    connections = psutil.Process(fleet.parts[name].pid).net_connections("tcp")
    return {c.raddr.port for c in connections if c.raddr and c.status == psutil.CONN_ESTABLISHED}


async def streams_until(url: str, act) -> list[Answer]:
    """NUM_STREAMS on a connection each; act(answers so far) when all flow."""
    flowing: list[Answer] = []

    async def one() -> Answer:
        async def on_event(answer: Answer) -> None:
            if not any(answer is known for known in flowing):
                flowing.append(answer)
                if len(flowing) == NUM_STREAMS:
                    act(flowing)

        async with httpx.AsyncClient(timeout=60) as client:
            return await stream_completion(client, url, BODY, on_event)

    return await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))


def test_a_routers_death_ends_only_its_own_streams_and_workers_free_their_blocks(two_routers):
    fleet, url = two_routers
    carried: set[int] = set()
    ports: list[int] = []

    def kill(flowing: list[Answer]) -> None:
        ports.extend(answer.local_port for answer in flowing)
        carried.update(ports_of(fleet, "router-0").intersection(ports))
        fleet.kill("router-0")

    answers = asyncio.run(streams_until(url, kill))
    lost = [answer for answer in answers if answer.local_port in carried]
    kept = [answer for answer in answers if answer.local_port not in carried]
    assert all(answer.failure.startswith(("broken", "cut off")) for answer in lost)
    assert [answer.failure for answer in kept] == [""] * len(kept)
    assert len({str(answer.content) for answer in kept}) == 1
    assert lost, "ten connections and none of them was the dead router's"
    assert kept
    assert_settles(fleet)
    fleet.start("router-0")
    fleet.wait_ready("router-0")
    assert becomes_true(lambda: asyncio.run(seen_by(fleet, url, "router-0")), 20), "the new one takes its part"


async def seen_by(fleet: Fleet, url: str, name: str) -> bool:
    """Whether one of some new connections is this router's, which answers it as the other does."""
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        answers = await asyncio.gather(*(stream_completion(client, url, {**BODY, "max_tokens": 5}) for _ in range(6)))
    assert [answer.failure for answer in answers] == [""] * 6
    assert len({str(answer.content) for answer in answers}) == 1
    logged = {entry.get("request_id") for entry in fleet.logged(name) if entry.get("event") == "request finished"}
    return any(answer.request_id in logged for answer in answers)
