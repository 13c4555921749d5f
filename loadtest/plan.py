"""Sessions in the order they are due, prepared ahead of time.

Building the body of a 32k-token prompt takes about a millisecond. Done when the request is due, that would delay it and
every token read meanwhile; so each stream keeps a bounded store of requests that only need to be written.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from loadtest.client.target import Send, Target
from loadtest.prompts import Conversation, PromptMaker
from loadtest.streams import StreamSpec
from loadtest.workloads.session import Session

_AHEAD_SESSIONS: Final = 256
_AHEAD_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Planned:
    """One session with its first request ready. due_s: offset from the start of the run (0 in the closed loop)."""

    due_s: float
    session: Session
    conversation: Conversation
    first_send: Send


class StreamPlan:
    """The sessions of one stream. Deterministic in (spec, seed); owned by the run."""

    def __init__(
        self, spec: StreamSpec, maker: PromptMaker, target: Target, *, seed: int, duration_s: float | None
    ) -> None:
        self.spec = spec
        # Streams must not warm each other's prefix cache.
        self._maker = dataclasses.replace(maker, source=maker.source.child(spec.name))
        self._target = target
        rng = random.Random(f"workload/{spec.name}/{seed}")
        sessions = spec.workload.sessions(self._maker.source, rng)
        self._due = _timed(spec, sessions, f"{spec.name}/{seed}", duration_s)
        self._ready: deque[Planned] = deque()
        self._ready_tokens = 0
        self._made = 0
        self.ended = False

    def fill(self) -> None:
        """Prepare as much as the store may hold. Raises BenchError for a workload that can't be read."""
        while not self.ended and self._has_room():
            self.prepare_one()

    def prepare_one(self) -> None:
        """Prepare one more session, where there is room and one is left."""
        if self.ended or not self._has_room():
            return
        item = next(self._due, None)
        if item is None:
            self.ended = True
            return
        due_s, session = item
        conversation = self._maker.conversation(session, self._made)
        self._made += 1
        send = self.prepare_turn(session, conversation, 0)
        self._ready.append(Planned(due_s, session, conversation, send))
        self._ready_tokens += len(session.turns[0].token_ids)

    def prepare_turn(self, session: Session, conversation: Conversation, turn: int) -> Send:
        keep = turn + 1 < len(session.turns)
        prompt = conversation.prompt(turn)
        return self._target.prepare(self.spec, prompt, session.turns[turn].max_tokens, keep_answer=keep)

    def _has_room(self) -> bool:
        return len(self._ready) < _AHEAD_SESSIONS and self._ready_tokens < _AHEAD_TOKENS

    def next_due_s(self) -> float | None:
        """None when the stream has no more sessions."""
        if not self._ready and not self.ended:
            self.prepare_one()
        return self._ready[0].due_s if self._ready else None

    def take(self) -> Planned | None:
        """The next session; None when there is none."""
        if self.next_due_s() is None:
            return None
        planned = self._ready.popleft()
        self._ready_tokens -= len(planned.session.turns[0].token_ids)
        return planned


def _timed(
    spec: StreamSpec, sessions: Iterator[Session], seed: str, duration_s: float | None
) -> Iterator[tuple[float, Session]]:
    arrival = spec.arrival
    if arrival.kind == "closed":
        for session in sessions:
            yield 0.0, session
        return
    offsets = None if arrival.kind == "trace" else arrival.offsets(seed)
    for session in sessions:
        due_s = (session.at_s or 0.0) / arrival.speed if offsets is None else next(offsets)
        if duration_s is not None and due_s >= duration_s:
            return
        yield due_s, session
