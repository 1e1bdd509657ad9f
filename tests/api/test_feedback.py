"""POST /v1/feedback: early, late, repeated, wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from api.served import LINE, Served, serving
from honed.engine.scripted import ScriptedSettings
from honed.loop import capture

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


def test_feedback_that_comes_long_after_its_turn_and_again_is_taken_and_the_newest_counts(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    reply = client.chat.completions.create(model=LINE, messages=[{"role": "user", "content": "hi"}])
    assert served.drain() == 1
    client.chat.completions.create(model=LINE, messages=[{"role": "user", "content": "another"}])
    for value in (True, False):
        row = {"target": reply.id, "name": "success", "value": value}
        assert client.post("/feedback", body=row, cast_to=httpx.Response).status_code == 200
        served.drain()
    assert [row.value for row in served.store.feedback.of([reply.id])] == [True, False]
    (failed,) = capture.flag(served.store, LINE, 0.0)
    assert [turn.id for turn in failed.turns] == [reply.id]


def test_a_list_with_a_correction_is_taken_whole(served: Served) -> None:
    correction = {
        "target": "chatcmpl-1", "name": "fix", "kind": "correction", "value": [{"role": "assistant", "content": "so"}],
    }  # fmt: skip
    answer = httpx.post(f"{served.url}/v1/feedback", json=[GOOD, correction])
    assert len(answer.json()) == 2
    served.drain()
    assert {row.kind for row in served.store.feedback.of(["chatcmpl-1"])} == {"metric", "correction"}


SAID = {"role": "assistant", "content": "so"}


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
        ({"kind": "correction", "value": [{**SAID, "weight": -1}]}, "value[0].weight"),
        ({"kind": "correction", "value": [{**SAID, "weight": "high"}]}, "value[0].weight"),
        ({"kind": "correction", "value": [{**SAID, "weight": 0}]}, "value"),
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
