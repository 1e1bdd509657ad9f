"""`honed why`: which version answered, what taught it, and what that cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from honed.store import Store
from honed.testing import fake_task
from honed.types import Version

from .conftest import Run, entry, trace

Read = Callable[..., Any]


@pytest.mark.usefixtures("store")
def test_a_response_is_explained_by_what_taught_its_version(run: Run, read: Read) -> None:
    told = read("why", "trace2-turn")
    (origin,) = told["versions"]
    assert (told["id"], told["trace"], told["origin"]) == ("trace2-turn", "trace2", "production")
    assert (origin["id"], origin["what"]) == ("support@1", "version")
    assert origin["failures"] == ["trace1"]
    assert [source["trace"] for source in origin["sources"]] == ["trace3"]
    assert origin["verdicts"][0]["decision"] == "promote"
    text = run("why", "trace2-turn").stdout
    assert "trace2-turn is of production, answered by support@1" in text
    assert "support@1, parent support@0, learned from 1 trace." in text
    assert "trace1  where is my refund?" in text


@pytest.mark.usefixtures("store")
def test_a_version_is_explained_as_its_responses_are(read: Read) -> None:
    told = read("why", "support@1")
    assert told == read("why", "trace2-turn")["versions"][0]
    assert told == read("why", "1")


@pytest.mark.usefixtures("store")
def test_the_base_model_is_named_as_such(run: Run, read: Read) -> None:
    text = run("why", "trace1-turn").stdout
    assert "support@0 is the base model" in text
    assert "learned from" not in text
    assert "flagged: bad_call" in text
    assert "feedback success = False" in text
    (origin,) = read("why", "trace1")["versions"]
    assert origin["what"] == "base model"
    assert "support@0 is the base model" in run("why", "support@0").stdout


@pytest.mark.usefixtures("store")
def test_a_policy_of_practice_is_told_from_a_version(run: Run, read: Read) -> None:
    assert "support@0.3 is a policy in the middle of practice: 3 updates after support@0" in run("why", "trace4").stdout
    assert read("why", "trace4")["versions"][0]["what"] == "practice"


def test_what_has_no_price_is_named(store: Store, run: Run, read: Read) -> None:
    assert "$0.500000 spent, and what has no price: train on gpu-x (1 entry)." in run("why", "support@1").stdout
    assert read("why", "support@1")["unpriced"] == {"train on gpu-x": 1}
    assert "the ledger has nothing that was spent on it." in run("why", "support@2").stdout
    store.ledger.add([entry("e3", subject="support@2", activity="sync")])
    assert "what was spent on it has no price: sync on cpu-core (1 entry)." in run("why", "support@2").stdout


def test_a_spend_that_was_taken_back_is_not_missed_twice(store: Store, read: Read) -> None:
    plain = {"subject": "support@1", "device": "gpu-x"}
    store.ledger.add([entry("reverse:e2", **plain), entry("restate:e2", **plain, outcome="rejected")])
    assert read("why", "support@1")["unpriced"] == {"train on gpu-x": 1}


def test_an_answer_without_a_version_is_said(store: Store, run: Run) -> None:
    store.traces.put(trace("trace9", "old words", version="", origin="import"))
    assert "answered by a version that was not recorded" in run("why", "trace9").stdout


def test_many_failures_are_counted_after_the_first(store: Store, run: Run) -> None:
    practised = []
    for number in range(10, 17):
        failed = f"trace{number}"
        task = msgspec.structs.replace(fake_task(f"refund number {number}"), source=failed)
        store.traces.put(trace(failed, f"failure {number}"))
        store.tasks.put([task])
        practised.append(f"attempt{number}")
        store.traces.put(trace(practised[-1], f"failure {number}", origin="rollout", task=task.id))
    store.versions.put(Version(line="support", number=3, parent=2), {"practice": practised})
    text = run("why", "3").stdout
    assert "taught by 7 production failures:" in text
    assert "and 2 more" in text
    assert "no gate has judged it." in text
