"""Tokens to text that may be shown: whole characters, and nothing that could still become a stop string.

text so far   … the answer is DEF          stop = ["DEFGHI"]
shown         … the answer is ╵            "DEF" is held back until it is known whether "GHI" follows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """common/model/tokenizer.py's IncrementalDetokenizer."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was completed by token number `num_tokens` (counted from 1) of those pushed with it."""

    text: str
    num_tokens: int


class TextStream:
    """stop: strings, none empty. stop_token_ids: tokens that end the output and are no part of its text.

    min_tokens: what the first so many tokens say completes no stop string. include_stop: the text ends behind the stop
    string or stop token, not before it.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        stop_token_ids: tuple[int, ...],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._num_unsearched = min_tokens
        self._include_stop = include_stop
        self._stop = stop
        self._stop_token_ids = frozenset(stop_token_ids)
        self._longest_held = max((len(s) for s in stop), default=1) - 1
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str | StopHit:
        """Text that became certain; after a StopHit the stream is over, and its text ends before the stop string."""
        if token_ids and token_ids[-1] in self._stop_token_ids and not self._include_stop:
            token_ids = token_ids[:-1]
        if not self._stop:
            return self._detokenizer.push(token_ids) if token_ids else ""
        shown: list[str] = []
        # One by one, so that it doesn't depend on how tokens were bundled which of them counts as the last.
        for count, token_id in enumerate(token_ids, start=1):
            if self._num_unsearched > 0:
                self._num_unsearched -= 1
                shown.append(self._detokenizer.push((token_id,)))
                continue
            text = self._held + self._detokenizer.push((token_id,))
            cut = self._find_stop(text)
            if cut is not None:
                return StopHit("".join((*shown, text[:cut])), count)
            shown.append(self._hold_back(text))
        return "".join(shown)

    def finish(self) -> str | StopHit:
        """The rest, once no token follows; a StopHit where the last characters complete a stop string after all."""
        text = self._held + self._detokenizer.flush()
        self._held = ""
        cut = None if self._num_unsearched > 0 else self._find_stop(text)
        return text if cut is None else StopHit(text[:cut], 0)

    def _find_stop(self, text: str) -> int | None:
        """Where the text ends: of the stop string that begins first, and of several there the shortest."""
        found = [(start, len(s)) for s in self._stop if (start := text.find(s)) >= 0]
        if not found:
            return None
        start, length = min(found)
        return start + length if self._include_stop else start

    def _hold_back(self, text: str) -> str:
        """Keeps the longest tail that begins a stop string; returns what stands before it."""
        for length in range(min(self._longest_held, len(text)), 0, -1):
            tail = text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                self._held = tail
                return text[:-length]
        self._held = ""
        return text
