"""One output from two legs: tokens arrive by index, in any order between the legs, and leave in order, each once.

prefill leg            [k]
decode leg                 [k+1, k+2] [k+3] …        may come before the prefill leg's frame
merged      0 … k-1   | k | k+1  k+2 | k+3
"""

from __future__ import annotations

from collections.abc import Sequence

from common.logprobs import TokenLogprobs


class TokenMerger:
    """token_ids: the output so far, without gaps; never longer than max_tokens."""

    def __init__(self, max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self._max_tokens = max_tokens
        # first index → tokens behind a gap; at most max_tokens of them, since indices beyond it are dropped.
        self._ahead: dict[int, list[int]] = {}

    def add(self, first_index: int, token_ids: Sequence[int]) -> bool:
        """Take tokens [first_index, first_index + len). Returns whether the output grew. Known indices are dropped."""
        output = self.token_ids
        if first_index == len(output) and not self._ahead and first_index + len(token_ids) <= self._max_tokens:
            output.extend(token_ids)
            return len(token_ids) > 0
        before = len(output)
        kept = list(token_ids[: max(0, self._max_tokens - first_index)])
        if first_index > before:
            if len(kept) > len(self._ahead.get(first_index, ())):
                self._ahead[first_index] = kept
            return False
        output.extend(kept[before - first_index :])
        self._drain_ahead()
        return len(output) > before

    def restart(self) -> None:
        """A new attempt goes on from the end of the output: what lay behind a gap will come anew."""
        self._ahead.clear()

    def _drain_ahead(self) -> None:
        for first_index in sorted(self._ahead):
            if first_index > len(self.token_ids):
                return
            tokens = self._ahead.pop(first_index)
            self.token_ids.extend(tokens[len(self.token_ids) - first_index :])


class LogprobsMerger:
    """What comes beside the tokens of a request that asked for logprobs; false as long as nothing came.

    A token's logprobs come in one frame with it, so whoever has taken the token finds them here.
    """

    def __init__(self, max_tokens: int, num_prompt_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._output: dict[int, TokenLogprobs] = {}
        self._prompt: list[TokenLogprobs] = []
        self._prompt_taken = False

    def __bool__(self) -> bool:
        return bool(self._output or self._prompt)

    def add(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Of output tokens from first_index on. What is known stays."""
        for index, each in enumerate(logprobs, first_index):
            if index < self._max_tokens:
                self._output.setdefault(index, each)

    def add_prompt(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Of prompt tokens from first_index ≥ 1 on; another attempt tells them anew."""
        num_known = len(self._prompt) + 1 - first_index
        room = self._num_prompt_tokens - 1 - len(self._prompt)
        if num_known >= 0:
            self._prompt += logprobs[num_known : num_known + room]

    def take(self, first_index: int, end_index: int) -> list[TokenLogprobs]:
        """Of the output tokens [first_index, end_index), for good."""
        found = (self._output.pop(index, None) for index in range(first_index, end_index))
        return [each for each in found if each is not None]

    def take_prompt(self) -> Sequence[TokenLogprobs]:
        """The prompt's, the first time."""
        if self._prompt_taken:
            return ()
        self._prompt_taken = True
        return self._prompt
