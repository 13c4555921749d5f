"""How wrong the prefix index is about each worker, by what workers then found in their caches. Pure.

    error(w) = Σ |foretold − found| / Σ max(foretold, found)       over w's last placements, older ones fading

Some error is honest: blocks are evicted between a placement and its step, or stored after it. What stays above the
bound is an index that does not say what the worker holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

BOUND: Final = 0.3
MIN_PLACEMENTS: Final = 20
_FADING: Final = 0.95


@dataclass(slots=True)
class _Account:
    num_placements: int = 0
    wrong_tokens: float = 0.0
    all_tokens: float = 0.0

    @property
    def error(self) -> float:
        return self.wrong_tokens / self.all_tokens if self.all_tokens else 0.0


class IndexErrors:
    """worker → account. Bounded by `keep`."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def note(self, worker: str, foretold: int, found: int) -> bool:
        """One placement's tokens. True: the error exceeds the bound, and the account begins anew."""
        account = self._accounts.setdefault(worker, _Account())
        account.num_placements += 1
        account.wrong_tokens = account.wrong_tokens * _FADING + abs(foretold - found)
        account.all_tokens = account.all_tokens * _FADING + max(foretold, found)
        if account.num_placements < MIN_PLACEMENTS or account.error <= BOUND:
            return False
        del self._accounts[worker]
        return True

    def ratio(self, worker: str) -> float:
        """In [0, 1]; 0 where nothing is known."""
        account = self._accounts.get(worker)
        return 0.0 if account is None else account.error

    def keep(self, workers: Collection[str]) -> None:
        """Forget all others."""
        for gone in self._accounts.keys() - set(workers):
            del self._accounts[gone]
