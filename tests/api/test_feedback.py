"""POST /v1/feedback: early, late, repeated, wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.served import Served, serving
from honed.engine.scripted import ScriptedSettings

GOOD = {"target": "chatcmpl-1", "name": "success", "value": 1}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, ScriptedSettings()) as running:
        yield running


def test_feedback_with_a_key_counts_once_and_may_come_before_its_target(served: Served) -> None:
    for _ in range(3):
        assert httpx.post(f"{served.url}/v1/feedback", json={**GOOD, "key": "k"}).status_code == 200
    served.drain()
    assert [row.value for row in served.store.feedback.of(["chatcmpl-1"])] == [1]


def test_a_list_with_a_correction_is_taken_whole(served: Served) -> None:
    correction = {
        "target": "chatcmpl-1", "name": "fix", "kind": "correction", "value": [{"role": "assistant", "content": "so"}],
    }  # fmt: skip
    answer = httpx.post(f"{served.url}/v1/feedback", json=[GOOD, correction])
    assert len(answer.json()) == 2
    served.drain()
    assert {row.kind for row in served.store.feedback.of(["chatcmpl-1"])} == {"metric", "correction"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"value": "much"}, "value"),
        ({"value": None}, "value"),
        ({"name": ""}, "name"),
        ({"target": None}, "target"),
        ({"kind": "praise"}, "kind"),
        ({"mood": 1}, "mood"),
        ({"kind": "correction", "value": "no"}, "value"),
    ],
)
def test_wrong_feedback_is_refused_by_field_and_nothing_of_it_kept(served: Served, change: dict, param: str) -> None:
    answer = httpx.post(f"{served.url}/v1/feedback", json={**GOOD, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert served.drain() == 0


def test_a_number_that_is_not_finite_is_refused(served: Served) -> None:
    body = b'{"target": "t", "name": "success", "value": NaN}'
    assert httpx.post(f"{served.url}/v1/feedback", content=body).status_code == 400
