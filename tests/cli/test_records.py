"""`honed traces`, `honed tasks`, `honed versions`: what they list and show, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.store import Store
from honed.testing import fake_task

from .conftest import SECRET, Run

Read = Callable[..., Any]


@pytest.mark.parametrize(
    ("noun", "sentence"),
    [("traces", "No traces yet."), ("tasks", "There are no such tasks."), ("versions", "No versions yet")],
)
def test_an_empty_store_is_said_in_a_sentence(run: Run, noun: str, sentence: str) -> None:
    done = run(noun, "ls")
    assert done.exit_code == 0
    assert sentence in done.stdout


@pytest.mark.usefixtures("store")
def test_traces_are_listed_newest_first(run: Run, read: Read) -> None:
    listed = read("traces", "ls", "--origin", "production")
    assert [trace["id"] for trace in listed] == ["trace2", "trace1"]
    assert [trace["id"] for trace in read("traces", "ls", "-n", "1")] == ["trace2"]
    assert [trace["id"] for trace in read("traces", "ls", "--signal", "bad_call")] == ["trace1"]
    assert read("traces", "ls", "--line", "other") == []
    table = run("traces", "ls").stdout
    assert "support@1" in table
    assert "bad_call" in table
    assert "timeout" in table  # a fault stands where a score would


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("id", ["trace1", "trace1-turn"])
def test_a_trace_is_shown_by_its_id_or_a_response_s(run: Run, read: Read, id: str) -> None:
    shown = run("traces", "show", id).stdout
    assert "user: where is" in shown
    assert "assistant: on its way" in shown
    assert "feedback success = False (user)" in shown
    assert read("traces", "show", id)["id"] == "trace1"


@pytest.mark.usefixtures("store")
def test_scores_and_faults_are_shown(run: Run) -> None:
    assert "score 1 by v" in run("traces", "show", "trace3").stdout
    assert "fault at verifier: slow" in run("traces", "show", "trace4").stdout


def test_tasks_carry_their_state_and_its_reason(store: Store, run: Run, read: Read) -> None:
    listed = read("tasks", "ls", "--state", "always")
    (only,) = listed["tasks"]
    assert (only["state"], only["reason"]) == ("always", "passed 4 of 4 attempts")
    assert only["task"]["prompt"][0]["content"] == "order too easy"
    assert "passed 4 of 4 attempts" in run("tasks", "ls").stdout
    assert ": passed 4 of 4 attempts" in run("tasks", "show", only["task"]["id"]).stdout
    assert read("tasks", "show", only["task"]["id"])["reason"] == "passed 4 of 4 attempts"


@pytest.mark.usefixtures("store")
def test_sealed_tasks_are_counted_and_never_shown(run: Run, read: Read) -> None:
    for arguments in ([], ["--split", "holdout"], ["--suite", "refunds"], ["--state", "ready"]):
        listed = read("tasks", "ls", *arguments)
        assert listed["sealed"] == [{"suite": "refunds", "kind": "refund", "state": "ready", "num_tasks": 3}]
        assert SECRET not in str(listed)
        text = run("tasks", "ls", *arguments).stdout
        assert "3 ready refund tasks of the suite refunds" in text
        assert SECRET not in text
    assert read("tasks", "ls", "--split", "holdout")["tasks"] == []
    assert read("tasks", "ls", "--split", "train")["sealed"] == []


def test_the_limit_keeps_the_newest_tasks(store: Store, run: Run, read: Read) -> None:
    newest = fake_task("order newest of all", split="train")
    store.tasks.put([newest])
    assert [row["task"]["id"] for row in read("tasks", "ls", "-n", "1")["tasks"]] == [newest.id]
    assert "3 older ones are not shown" in run("tasks", "ls", "-n", "1").stdout


def test_a_task_is_shown_with_its_attempts(store: Store, run: Run, read: Read) -> None:
    (task,) = store.tasks.list(source="trace1")
    assert "2 attempts, 1 passed, 1 fault" in run("tasks", "show", task.id).stdout
    shown = read("tasks", "show", task.id)
    assert set(shown["attempts"]) == {"trace3", "trace4"}
    assert shown["state"] == "ready"


@pytest.mark.usefixtures("store")
def test_versions_are_listed_with_verdict_and_what_serves(run: Run, read: Read) -> None:
    listed = read("versions", "ls", "--line", "support")
    assert [(row["id"], row["verdict"], row["serves"]) for row in listed] == [
        ("support@1", "promote", True),
        ("support@2", None, False),
    ]
    table = run("versions", "ls").stdout.splitlines()
    assert "support@0" in table[1]
    assert "promote" in table[1]
    assert "serves" in table[1]
    assert "serves" not in table[2]


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("id", ["support@1", "1"])
def test_a_version_is_shown_with_its_verdicts(run: Run, read: Read, id: str) -> None:
    shown = run("versions", "show", id).stdout
    assert "support@1  adapter  parent support@0" in shown
    assert "target refunds: 20.0 % -> 60.0 %, gain +40.0 points [+20.0, +60.0], 40 tasks" in shown
    assert "better on refunds" in shown
    told = read("versions", "show", id)
    assert told["id"] == "support@1"
    assert told["verdicts"][0]["decision"] == "promote"


@pytest.mark.usefixtures("store")
def test_the_base_model_is_shown_as_what_it_is(run: Run) -> None:
    assert "support@0 is the base model" in run("versions", "show", "support@0").stdout


@pytest.mark.usefixtures("store")
def test_a_line_is_rolled_back_by_hand(run: Run, read: Read) -> None:
    assert read("versions", "rollback", "support", "--reason", "it hurts")["version"] == "support@0"
    assert not any(row["serves"] for row in read("versions", "ls"))


@pytest.mark.usefixtures("store")
def test_a_version_past_the_gate_wants_force_and_a_reason(run: Run) -> None:
    refused = run("versions", "release", "support@2")
    assert refused.exit_code == 2
    silent = run("versions", "release", "support@2", "--force")
    assert silent.exit_code == 2
    assert "--reason" in silent.stderr


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["traces", "show", "nothing"], "no trace and no response is called 'nothing'"),
        (["traces", "ls", "--origin", "foo"], "'production', 'rollout', 'eval', 'demonstration', 'import'"),
        (["traces", "ls", "--limit", "0"], "--limit"),
        (["tasks", "show", "nothing"], "no task 'nothing'"),
        (["tasks", "ls", "--split", "foo"], "'train', 'dev', 'holdout'"),
        (["tasks", "ls", "--state", "foo"], "'ready', 'waiting', 'always', 'never', 'retired', 'quarantined'"),
        (["versions", "show", "support@9"], "no version support@9"),
        (["versions", "show", "elsewhere@0"], "there is no line 'elsewhere': the config's is 'support'"),
        (["why", "elsewhere@0"], "there is no line 'elsewhere'"),
        (["eval", "elsewhere@0"], "there is no line 'elsewhere'"),
        (["versions", "show", "foo"], "write line@number (lines: support)"),
        (["why", "nothing"], "no trace and no response is called 'nothing'"),
        (["eval", "support@1", "--split", "foo"], "'train', 'dev', 'holdout'"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_allowed(run: Run, arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.split())
    assert done.stdout == ""


@pytest.mark.usefixtures("store")
def test_merging_what_is_no_adapter_or_another_models_is_refused(run: Run, tmp_path: Path) -> None:
    base = run("versions", "merge", "support@0", str(tmp_path / "m"))
    assert base.exit_code == 2
    assert "support@0 is the base model: there is nothing to merge" in base.stderr
    assert not (tmp_path / "m").exists()
