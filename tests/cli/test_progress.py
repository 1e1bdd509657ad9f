"""Progress: a live view on a terminal, log lines for everything else."""

from __future__ import annotations

import io
import json

import pytest

from honed import log
from honed.cli.progress import watch


class Terminal(io.StringIO):
    """A stream that says that a person looks at it."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    sink = io.StringIO()
    log.configure(sink)
    try:
        with watch(io.StringIO()) as on_event:
            on_event("gate.progress", {"done": 1, "of": 2})
    finally:
        log.configure()
    line = json.loads(sink.getvalue())
    assert (line["event"], line["done"], line["of"]) == ("gate.progress", 1, 2)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar_a_stage() -> None:
    terminal = Terminal()
    with watch(terminal) as on_event:
        on_event("learn.imitated", {"step": 1, "of": 4, "loss": 0.5})
        on_event("learn.practised", {"step": 2, "of": 3, "reward": 0.25})
        on_event("gate.progress", {"done": 3, "of": 7})
        on_event("evaluate.progress", {"done": 5, "of": 9})
        on_event("learn.group", {"scores": "hidden"})
        on_event("turn.curated", {"run": "r", "tasks": 12})
    shown = terminal.getvalue()
    for told in ("loss 0.500", "1/4", "reward 25 %", "2/3", "3/7", "5/9", "turn curated  tasks 12"):
        assert told in shown
    assert "hidden" not in shown
    assert "evaluate progress" not in shown  # one bar, no line an attempt
