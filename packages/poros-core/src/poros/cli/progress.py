"""Progress on a terminal: a bar with an estimate where there is one, plain lines now and then where there is none."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from poros.training.progress import StepRecord

LINE_EVERY = 5.0
"""Seconds between two lines of progress when the output is not a terminal."""


class Display:
    """Shows long tasks and training steps on stderr. A context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._total = self._done = self._first = 0
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._bars.console.print(escape(text), soft_wrap=True)

    def advance(self, what: str, done: int, total: int) -> None:
        """A long task has come this far; another total, or fewer done than before, begins a new bar."""
        self._show(what, done, total, "")

    def step(self, record: StepRecord) -> None:
        """A training step."""
        count = f"step {record.step}/{record.steps}  " if self._console.is_terminal else ""  # plain lines begin with it
        rate = record.tokens / record.seconds if record.seconds else 0.0
        self._show(
            "training",
            record.step,
            record.steps,
            f"{count}loss {record.loss:.4f}  {rate:,.0f} tok/s",
        )

    def _show(self, what: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if self._task is None or total != self._total or done < self._done:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(what, total=total, completed=done, note=note)
            self._total, self._first, self._began, self._said = total, done, now, now
        self._done = done
        self._bars.update(self._task, description=what, completed=done, note=note)
        if not self._console.is_terminal and now - self._said >= LINE_EVERY:
            self._said = now
            worked = done - self._first
            left = f"  ETA {(now - self._began) / worked * (total - done):.0f} s" if worked else ""
            self.note(f"{what}: {done}/{total}  {note}{left}")
