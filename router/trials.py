"""Requests that may have killed a worker get their next attempt one at a time, first come first."""

from __future__ import annotations

from collections import OrderedDict

from router.request import RequestRun


class Trials:
    """Owned by the dispatcher, and bounded by what it has in flight."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[RequestRun, None] = OrderedDict()
        self._on_trial: RequestRun | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._on_trial is not None)

    def enter(self, run: RequestRun) -> None:
        """It is started when no other is on trial, perhaps now. One that was on trial goes to the end of the line."""
        if self._on_trial is run:
            self._on_trial = None
        self._waiting[run] = None
        self._start_next()

    def leave(self, run: RequestRun) -> None:
        """Proven or ended. A no-op for a run that is not here."""
        self._waiting.pop(run, None)
        if self._on_trial is run:
            self._on_trial = None
            self._start_next()

    def _start_next(self) -> None:
        if self._on_trial is None and self._waiting:
            self._on_trial, _ = self._waiting.popitem(last=False)
            self._on_trial.start()
