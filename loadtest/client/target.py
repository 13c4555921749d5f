"""What the runner needs of a server, whatever protocol it speaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from loadtest.prompts import Prompt
from loadtest.record import RequestRecord
from loadtest.streams import StreamSpec

Send: TypeAlias = Callable[[RequestRecord], Awaitable[None]]
"""Sends a prepared request and fills the record: sent_s, events, usage, failure. Never raises for the server's faults;
the caller's cancellation aborts the request at the server. The caller closes the record."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """model: the name requests carry. max_model_len: 0 where the server does not tell."""

    url: str
    api: str
    model: str
    max_model_len: int = 0
    server: str = ""


class Target(Protocol):
    """One server. Built and closed inside one event loop; owns its connections and tasks."""

    async def open(self) -> TargetInfo:
        """Reach the server and learn what it serves. Raises TargetError."""
        ...

    def prepare(self, stream: StreamSpec, prompt: Prompt, max_tokens: int, *, keep_answer: bool) -> Send:
        """Do all work that can be done before the request is due."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """
    temperature: 0 is greedy. ignore_eos: answers have exactly the length asked for. extra_body: merged into HTTP bodies
    last. headers: added to each HTTP request. token_ids: ask the server to send token ids along.
    """

    model: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    token_ids: bool = False
    extra_body: tuple[tuple[str, object], ...] = ()
    headers: Sequence[tuple[str, str]] = ()
    keep_alive: bool = True
    timeout_s: float = 600.0
