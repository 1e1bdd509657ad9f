"""What a person sees of a turn of the loop: one line a stage, with a bar and the time left, on a terminal only.

Programs get the same events as JSON lines on stderr, one an event, by `honed.log`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from honed.log import log
from honed.loop.rollout import OnEvent

QUIET = {"learn.group"}
"""Events that a person need not see one by one."""


@contextmanager
def watch(to: TextIO | None = None) -> Iterator[OnEvent]:
    """A function for a loop's events: a live view where `to` (None: stderr) is a terminal, else log lines."""
    to = to or sys.stderr
    if not to.isatty():
        yield _to_log
        return
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=to)) as progress:
        yield _View(progress).on_event


def _to_log(event: str, fields: dict[str, Any]) -> None:
    log(event, **fields)


class _View:
    """Keeps one bar a stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def on_event(self, event: str, fields: dict[str, Any]) -> None:
        """Moves the bar that the event belongs to, or prints a line."""
        if event == "learn.imitated":
            self._move("imitate", f"imitate   loss {fields['loss']:.3f}", fields["step"], fields["of"])
        elif event == "learn.practised":
            self._move("practise", f"practise  reward {100 * fields['reward']:.0f} %", fields["step"], fields["of"])
        elif event == "gate.progress":
            self._move("gate", "gate      attempts", fields["done"], fields["of"])
        elif event == "evaluate.progress":
            self._move("evaluate", "evaluate  attempts", fields["done"], fields["of"])
        elif event not in QUIET:
            told = "  ".join(f"{key} {value}" for key, value in fields.items() if key != "run")
            self._progress.console.print(f"{event.replace('.', ' ')}  {told}", highlight=False, markup=False)

    def _move(self, stage: str, text: str, done: int, of: int) -> None:
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(text, total=of)
        self._progress.update(self._bars[stage], description=text, completed=done, total=of)
