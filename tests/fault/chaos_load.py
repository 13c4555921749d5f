"""The load under which things break: clients that ask for known texts, leave early at times, and keep account."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.answers import Answer, stream_completion

CLIENT_PAUSE_S = 0.05
LEAVES_EARLY = 0.1
TIMEOUT_S = 60


def catalogue(chance: random.Random) -> dict[str, dict[str, Any]]:
    """What is asked for, by name."""

    def prompt(num_tokens: int) -> list[int]:
        return [chance.randrange(3, 280) for _ in range(num_tokens)]

    base = {"ignore_eos": True, "timeout": TIMEOUT_S}
    sampled = {"temperature": 1.1, "top_p": 0.95}
    return {
        "greedy": {**base, "prompt": prompt(20), "max_tokens": 60, "temperature": 0},
        "long prompt": {**base, "prompt": prompt(400), "max_tokens": 24, "temperature": 0},
        "sampled": {**base, **sampled, "prompt": prompt(40), "max_tokens": 60, "seed": 3, "logprobs": 1},
        "choices": {**base, **sampled, "prompt": prompt(70), "max_tokens": 40, "seed": 5, "n": 3},
        "penalties": {**base, **sampled, "prompt": prompt(30), "max_tokens": 50, "seed": 9, "frequency_penalty": 0.6},
        "one token": {**base, "prompt": prompt(100), "max_tokens": 1, "temperature": 0},
    }


@dataclass(frozen=True)
class Entry:
    """One request. router: the one that was asked. left: the client went away on purpose."""

    name: str
    router: str
    answer: Answer
    left: bool


@dataclass
class Load:
    """urls: by router's name. clean: content of each undisturbed answer. Runs in a thread of its own until `stop`."""

    urls: dict[str, str]
    asked: dict[str, dict[str, Any]]
    clean: dict[str, Any]
    seed: int
    num_clients: int
    num_sent: int = 0
    entries: list[Entry] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        asyncio.run(self._run())

    def outcomes(self) -> Counter[str]:
        return Counter("left" if entry.left else entry.answer.failure or "whole" for entry in self.entries)

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S + 30) as client:
            await asyncio.gather(*(self._client(client, index) for index in range(self.num_clients)))

    async def _client(self, client: httpx.AsyncClient, index: int) -> None:
        chance = random.Random(self.seed * 1000 + index)
        while not self.stopping.is_set():
            name, router = chance.choice(sorted(self.asked)), chance.choice(sorted(self.urls))
            leave_after = chance.randrange(0, 12) if chance.random() < LEAVES_EARLY else None
            self.num_sent += 1
            self.entries.append(await self._one(client, name, router, leave_after))
            await asyncio.sleep(CLIENT_PAUSE_S)

    async def _one(self, client: httpx.AsyncClient, name: str, router: str, leave_after: int | None) -> Entry:
        seen = 0

        async def on_event(answer: Answer) -> None:
            nonlocal seen
            seen += 1
            if seen == leave_after:
                raise _LeftError

        try:
            answer = await stream_completion(client, self.urls[router], self.asked[name], on_event)
        except _LeftError as left:
            return Entry(name, router, left.args[0] if left.args else Answer(0.0), left=True)
        return Entry(name, router, answer, left=False)


class _LeftError(Exception):
    """The client closes its connection."""


async def clean_run(urls: dict[str, str], asked: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Content by name, once by each router, which must agree."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S + 30) as client:
        found: dict[str, Any] = {}
        for url in urls.values():
            for name, body in asked.items():
                answer = await stream_completion(client, url, body)
                if answer.failure:
                    raise RuntimeError(f"the clean run fails at {name}: {answer.failure}")
                if found.setdefault(name, answer.content) != answer.content:
                    raise RuntimeError(f"two clean runs of {name} differ")
        return found
