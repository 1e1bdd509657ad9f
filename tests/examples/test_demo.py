"""The demo's story: its folder, and the marks of its plot. The whole of it runs by `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.demo import Story

from honed.errors import Refused


def test_a_mark_stands_where_the_story_is_or_after_a_versions_last_answer(tmp_path: Path) -> None:
    story = Story(1, tmp_path / "run")
    story.requests = [{"version": f"support@{number}"} for number in (1, 1, 2, 3, 3, 2)]
    story.mark("now")
    story.mark("taken back", after="support@3")
    story.mark("never served", after="support@9")
    assert [mark["request"] for mark in story.marks] == [6, 5, 6]


def test_an_older_run_is_replaced_and_anything_else_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Story(1, folder)
    (folder / "store").mkdir()
    Story(2, folder)
    assert not (folder / "store").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("keep me")
    with pytest.raises(Refused, match="holds something else than a demo"):
        Story(1, mine)
    assert (mine / "letter.txt").read_text() == "keep me"
