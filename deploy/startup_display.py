"""What a person sees while a cluster starts: a live line a part on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartupDisplay:
    """Use as a context manager. Parts appear when first named; a line is printed only when it says something new."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description:<10}"))
            self._progress = Progress(
                *columns, TextColumn("{task.fields[doing]}"), TimeElapsedColumn(), console=console
            )
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, part: str, doing: str, *, done: bool = False) -> None:
        """`part` is now `doing` that."""
        if not doing or self._said.get(part) == doing:
            return
        self._said[part] = doing
        if self._progress is None:
            self._console.print(f"{part}: {doing}", highlight=False, markup=False, soft_wrap=True)
            return
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, total=1, doing="")
        self._progress.update(self._tasks[part], doing=doing, completed=int(done))
