"""A small store of a line "support" behind a config file: what every command of the tests looks at."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from honed.cli import app
from honed.store import Store, open_store
from honed.testing import fake_task
from honed.types import (
    Entry,
    Fault,
    Feedback,
    Message,
    Release,
    Sampling,
    Score,
    Span,
    SuiteResult,
    Trace,
    Turn,
    Verdict,
    Version,
)

CONFIG = """
[model]
source = "scripted"
line = "support"
[store]
root = "kept"
"""
SECRET = "refund sealed words that nobody may read"

Run = Callable[..., Result]


def trace(id: str, said: str, *, version: str = "support@0", **fields: Any) -> Trace:
    """One question and its answer; the response's id is the trace's with -turn behind it."""
    turn = Turn(
        id=f"{id}-turn",
        trace=id,
        added=(Message(role="user", content=said),),
        reply=Message(role="assistant", content="on its way"),
        output=(4, 5),
        logprobs=(-0.5, -0.25),
        context=(1, 2, 3),
        sampling=Sampling(),
        model="support",
        versions=(Span(version=version, count=2),) if version else (),
        finish="stop",
        at=10.0,
    )
    return Trace(id=id, line="support", turns=(turn,), **{"origin": "production", "at": 10.0, **fields})


def version(number: int) -> Version:
    return Version(line="support", number=number, parent=number - 1, uri=f"/v/{number}", digest=f"d{number}", at=20.0)


def entry(id: str, **fields: Any) -> Entry:
    plain = {"activity": "train", "device": "cpu-core", "seconds": 1.0, "line": "support", "at": 1.0}
    return Entry(id=id, **{**plain, **fields})


VERDICT = Verdict(
    id="verdict1",
    version="support@1",
    baseline="support@0",
    decision="promote",
    suites=(
        SuiteResult(
            suite="refunds",
            role="target",
            gain=0.4,
            low=0.2,
            high=0.6,
            baseline=0.2,
            candidate=0.6,
            num_tasks=40,
            num_clusters=40,
            p_value=0.001,
            passed=True,
        ),
    ),
    reasons=("better on refunds",),
    at=21.0,
)


def fill(store: Store) -> None:
    """A base model that failed, the task made of it, the version that it taught, and what that cost."""
    store.traces.put(trace("trace1", "where is\nmy refund?", signals=("bad_call",)))
    store.traces.put(trace("trace2", "and my order?", version="support@1", at=30.0))
    store.feedback.add([Feedback(id="f1", target="trace1-turn", name="success", value=False, at=11.0)])
    learned = fake_task("refund learned", split="train", suite="refunds")
    sources = {"source": "trace1"}
    store.tasks.put([_with(learned, **sources), fake_task("order second", split="dev", suite="orders")])
    store.tasks.put([fake_task("order too easy", split="train")], state="always", reason="passed 4 of 4 attempts")
    store.tasks.put([fake_task(f"{SECRET} {at}", split="holdout", suite="refunds") for at in range(3)])
    store.traces.put(
        trace("trace3", "refund learned", origin="rollout", task=learned.id, score=Score(value=1.0, verifier="v"))
    )
    lost = Fault(boundary="verifier", kind="timeout", message="slow")
    store.traces.put(trace("trace4", "x", origin="rollout", task=learned.id, version="support@0.3", fault=lost))
    store.versions.put(version(1), {"practice": ["trace3"]})
    store.versions.put(version(2))
    store.verdicts.put(VERDICT)
    store.releases.put(Release(id="r1", line="support", version="support@1", kind="promote", verdict="verdict1", at=22))
    priced = {"subject": "support@1", "dollars": 0.5}
    store.ledger.add([entry("e1", **priced), entry("e2", **{**priced, "device": "gpu-x", "dollars": None})])


def _with(task: Any, **changes: Any) -> Any:
    return type(task)(**{**{name: getattr(task, name) for name in task.__struct_fields__}, **changes})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file in an empty folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "support.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def store(config: Path) -> Iterator[Store]:
    """The filled store of the config."""
    with open_store(None, config.parent / "kept") as opened:
        fill(opened)
        yield opened


@pytest.fixture
def run(config: Path) -> Run:
    """Runs a command on the config."""

    def command(*arguments: str, env: dict[str, str] | None = None) -> Result:
        return CliRunner().invoke(app, arguments, env={"HONED_CONFIG": str(config), **(env or {})})

    return command


@pytest.fixture
def read(run: Run) -> Callable[..., Any]:
    """Runs a command with --json and reads what it printed."""

    def command(*arguments: str, code: int = 0) -> Any:
        done = run(*arguments, "--json")
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    return command
