"""Events are JSON lines with the ids of their context, and never break the caller."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from honed import log


@pytest.fixture
def sink() -> Iterator[io.StringIO]:
    """Where events go during the test."""
    stream = io.StringIO()
    log.configure(stream)
    yield stream
    log.configure()


def events(sink: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_an_event_is_one_json_line(sink: io.StringIO) -> None:
    log.log("rollout.scored", task="t1", score=0.5, text="two\nlines")
    (event,) = events(sink)
    assert event.pop("at") > 1e9
    assert event == {"event": "rollout.scored", "task": "t1", "score": 0.5, "text": "two\nlines"}


def test_ids_come_from_the_context_and_an_event_s_own_win(sink: io.StringIO) -> None:
    with log.bind(run="r1", task="outer"):
        with log.bind(task="inner"):
            log.log("one")
        log.log("two", task="own")
    log.log("three")
    one, two, three = events(sink)
    assert (one["run"], one["task"]) == ("r1", "inner")
    assert (two["run"], two["task"]) == ("r1", "own")
    assert set(three) == {"at", "event"}


def test_a_failed_block_unbinds(sink: io.StringIO) -> None:
    with pytest.raises(ValueError), log.bind(run="r1"):
        raise ValueError
    log.log("after")
    assert "run" not in events(sink)[0]


async def test_tasks_carry_the_ids_of_where_they_were_started(sink: io.StringIO) -> None:
    async def work(name: str) -> None:
        with log.bind(task=name):
            await asyncio.sleep(0)
            log.log("worked")

    with log.bind(run="r1"):
        await asyncio.gather(work("a"), work("b"))
    assert [(event["run"], event["task"]) for event in events(sink)] == [("r1", "a"), ("r1", "b")]


def test_what_json_does_not_know_is_written_as_text(sink: io.StringIO) -> None:
    log.log("odd", value={1}, error=ValueError("broken"))
    assert events(sink)[0]["error"] == "broken"


def test_a_sink_that_fails_is_no_error_of_the_caller(sink: io.StringIO) -> None:
    sink.close()
    log.log("lost")


def test_events_can_be_switched_off(sink: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure(enabled=False)
    log.log("nothing")
    assert capsys.readouterr().err == ""
    log.configure()
    log.log("something")
    assert json.loads(capsys.readouterr().err)["event"] == "something"
    assert sink.getvalue() == ""
