"""A turn's books: what a killed loop owes is charged once, and what nothing came of is waste."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import msgspec
import pytest

from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.loop import books
from honed.loop.judge import Bench
from honed.loop.lessons import Plan
from honed.loop.rollout import make_group
from honed.loop.run import abandon, run_once
from honed.loop.turn import TURN, Job, Loop
from honed.testing import FakeEngine
from honed.types import Decision, Entry, Release, SuiteResult, Verdict, Version

from .road import LINE, holdout, make_loop, rollouts_of

CANDIDATE = f"{LINE}@1"


def spent(id: str, activity: str = "train", **changes: object) -> Entry:
    fields = {"device": "cpu-core", "seconds": 2.0, "dollars": 1.0, "line": LINE, "subject": CANDIDATE, "at": 1.0}
    return Entry(id=id, activity=activity, **{**fields, **changes})  # type: ignore[arg-type]


def before_deploy(folder: Path, decision: Decision) -> Loop:
    """A loop whose turn has its verdict and was cut off before it deployed."""
    loop = make_loop(folder)
    base = Version(line=LINE, number=0)
    loop.store.versions.put(Version(line=LINE, number=1, parent=0, uri="u", digest="d", at=1.0))
    suite = SuiteResult(
        suite="refunds", role="target", gain=0.3, low=0.2, high=0.4, baseline=0.2, candidate=0.5, num_tasks=40,
        num_clusters=40, p_value=0.01, passed=True,
    )  # fmt: skip
    verdict = Verdict(id="verdict", version=CANDIDATE, baseline=base.id, decision=decision, suites=(suite,), at=1.0)
    loop.store.verdicts.put(verdict)
    plan = Plan(run="run", line=LINE, number=1, parent=base, recipe=loop.recipe)
    job = Job(phase="deploy", plan=plan, version=CANDIDATE, verdict=verdict.id)
    loop.store.jobs.put(LINE, TURN, msgspec.to_builtins(job))
    loop.store.ledger.add([spent("a"), spent("b", "generate", outcome="zero_variance"), spent("c", "idle")])
    return loop


def outcomes(loop: Loop) -> dict[str, float]:
    rows = loop.store.ledger.totals(LINE, stage="learn")
    sums = {f"{row.group['activity']} {row.group['outcome']}": row.seconds for row in rows}
    return {name: seconds for name, seconds in sums.items() if seconds}


WASTED = {"train rejected": 2.0, "generate zero_variance": 2.0, "idle used": 2.0}


@pytest.mark.parametrize("decision", ["reject", "inconclusive", "invalid"])
async def test_what_no_release_came_of_is_waste(tmp_path: Path, decision: Decision) -> None:
    loop = before_deploy(tmp_path, decision)
    assert (await run_once(loop)).release is None
    assert outcomes(loop) == WASTED


async def test_a_release_that_was_refused_leaves_waste(tmp_path: Path) -> None:
    loop = before_deploy(tmp_path, "promote")
    loop.store.versions.put(Version(line=LINE, number=7, parent=0))
    loop.store.releases.put(Release(id="r7", line=LINE, version=f"{LINE}@7", kind="force", reason="by hand", at=1.0))
    assert (await run_once(loop)).ended == "invalid"
    assert outcomes(loop) == WASTED


async def test_an_abandoned_turn_leaves_waste(tmp_path: Path) -> None:
    loop = before_deploy(tmp_path, "promote")
    assert await abandon(loop)
    assert outcomes(loop) == WASTED


async def test_what_was_released_was_used(tmp_path: Path) -> None:
    loop = before_deploy(tmp_path, "promote")
    assert (await run_once(loop)).ended == "promoted"
    assert outcomes(loop) == {"train used": 2.0, "generate zero_variance": 2.0, "idle used": 2.0}
    books.waste(loop.store, LINE, CANDIDATE, at=2.0)
    assert "train rejected" not in outcomes(loop)


async def test_stored_attempts_that_were_not_charged_are_charged_once(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    learner, base = await loop.runtime.learner(), Version(line=LINE, number=0)
    assert isinstance(learner.engine, FakeEngine)
    learner.engine.skills |= {f"{base.id}.1": {}, f"{LINE}@9": {}}
    rollouts, meter = rollouts_of(learner), Meter(load_book(), line=LINE)
    task, gate = holdout(1)
    traces = [await rollouts.attempt(task, f"{base.id}.1", f"run/1/0/{number}", seed=number) for number in range(4)]
    loop.store.groups.put("run", 1, 0, make_group("run/1", 0, task, traces))
    mine = await Bench(loop.store, rollouts, loop.gate).attempt(gate, base.id, 0)  # stored, and killed before its entry
    other = await Bench(loop.store, rollouts, loop.gate, run="x").attempt(gate, f"{LINE}@9", 0)  # another turn's
    rollouts = dataclasses.replace(rollouts, meter=meter)
    job = Job(phase="learn", plan=Plan(run="run", line=LINE, number=1, parent=base))
    for _ in range(2):
        await books.recharge(loop.store, rollouts, job)
    entries = loop.store.ledger.list(LINE, subject=CANDIDATE)
    assert {entry.id for entry in entries} == {f"turn:{turn.id}" for trace in (*traces, mine) for turn in trace.turns}
    assert len(entries) == 5
    assert other.turns  # another turn pays for it
    assert sorted({entry.activity for entry in entries}) == ["eval", "generate"]
    assert meter.busy() == 0.0


async def test_idle_and_what_serving_used_never_exceed_the_machine(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    loop = make_loop(tmp_path)
    meter = Meter(load_book(), line=LINE, cores=2)
    rollouts = dataclasses.replace(rollouts_of(await loop.runtime.learner()), meter=meter)
    job = Job(phase="learn", plan=Plan(run="run", line=LINE, number=1, parent=Version(line=LINE, number=0)))
    now = time.time()
    loop.store.ledger.add([spent("s", "generate", stage="serve", seconds=9.0, at=now), spent("t", stage="serve", at=1)])
    meter.charge("train", 4.0)
    await books.end_life(loop.store, rollouts, job, began=now, wall_seconds=10.0)
    assert [e.seconds for e in loop.store.ledger.list() if e.activity == "idle"] == [pytest.approx(20.0 - 9.0 - 4.0)]
