"""One turn of the loop, from traffic to a release, with fakes on a real store."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.errors import ConfigError, EngineError, NotFound, Refused, StoreError, UserError
from honed.loop.capture import CaptureSettings
from honed.loop.curate import CurateSettings
from honed.loop.gate import GateSettings
from honed.loop.lessons import LearnSettings, Phase
from honed.loop.rollout import Rollouts
from honed.loop.run import abandon, run_forever, run_once
from honed.loop.turn import Given, Loop, TurnReport
from honed.protocols import Learner, Loss, StepResult
from honed.testing import FakeEngine, FakeRuntime, FakeTrainer, fake_task
from honed.types import Message, Sample, Version

from .road import LINE, failing_line, holdout, make_loop, rollouts_of, traffic


async def test_a_turn_turns_failures_into_a_released_version(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    report = await run_once(loop)
    assert report.ended == "promoted", report
    assert report.version == f"{LINE}@1"
    assert report.release == loop.store.releases.current(LINE)
    assert report.verdict == loop.store.verdicts.list(report.version)[0]
    assert report.num_failures >= report.num_tasks > 0
    assert report.num_demonstrations > 0
    assert len(report.rewards) == 3
    assert not report.resumed
    assert loop.store.jobs.get(LINE, "turn") is None


async def test_a_version_has_a_manifest_of_what_made_it(tmp_path: Path) -> None:
    given = {"config": {"learn": {"steps": 3}}, "code": {"version": "1", "digest": "abc"}}
    loop = await failing_line(tmp_path, manifest=given)
    report = await run_once(loop)
    manifest = json.loads(loop.store.blobs.read(f"manifests/{LINE}/1.json"))
    version = loop.store.versions.find(report.version)
    assert manifest["version"]["parent"] == manifest["plan"]["parent"]["number"] == 0
    assert manifest["version"]["data"] == version.data
    assert manifest["version"]["digest"] == version.digest
    assert len(version.data) == 64
    assert manifest["plan"]["demonstrations"]
    assert (manifest["config"], manifest["code"]) == (given["config"], given["code"])


async def test_dev_tasks_tell_what_each_phase_added(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    loop.store.tasks.put([fake_task(f"refund dev case {i}", suite="refunds-dev", split="dev") for i in range(20)])
    learn = LearnSettings(steps=3, groups_per_step=4, group_size=4, dev_suites=("refunds-dev",))
    report = await run_once(dataclasses.replace(loop, learn=learn))
    assert [(each.after, each.suite, each.num_tasks) for each in report.measured] == [
        (after, "refunds-dev", 20) for after in ("nothing", "sft", "practice")
    ]
    before, shown, practised = (each.success for each in report.measured)
    assert before is not None
    assert shown is not None
    assert practised is not None
    assert before <= shown < practised
    plain = await run_once(await failing_line(tmp_path / "plain"))
    assert report.version == plain.version
    one, other = (loop.store.versions.get(LINE, 1), make_loop(tmp_path / "plain").store.versions.get(LINE, 1))
    assert one.digest == other.digest  # looking changes nothing that is learned


async def test_a_dev_suite_without_tasks_is_refused_before_any_compute(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    loop = dataclasses.replace(loop, learn=LearnSettings(dev_suites=("nothing-here",)))
    with pytest.raises(ConfigError, match=r"learn\.dev_suites names 'nothing-here'"):
        await run_once(loop)
    assert isinstance(loop.runtime, FakeRuntime)
    assert loop.store.jobs.get(LINE, "turn") is None


async def test_provenance_runs_back_to_the_customer_by_keys_alone(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    report = await run_once(loop)
    sources = {source for _, _, source in loop.store.versions.sources(report.version) if source}
    origins = {loop.store.traces.get(id).origin for id in sources}
    assert origins == {"production"}
    taught = next(iter(sources))
    assert report.version in loop.store.versions.taught_by(taught)


async def test_a_replayed_success_is_no_failure_that_taught(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path, curate=CurateSettings(probe_attempts=4, replay=6))
    report = await run_once(loop)
    versions, traces = loop.store.versions, loop.store.traces
    replayed = {id for id, _, _ in versions.sources(report.version, role="replay")}
    assert len(replayed) == 6
    assert {traces.get(id).turns[0].reply.content for id in replayed} == {"right"}
    failures = {source for _, _, source in versions.sources(report.version) if source}
    assert failures
    assert all(traces.get(id).signals for id in failures)


async def test_the_report_says_what_was_not_practised_and_why(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path, base={"order": 0.6, "refund": 0.0})
    loop = dataclasses.replace(loop, learn=loop.learn.model_copy(update={"imitate": False, "steps": 1}))
    report = await run_once(loop)
    lost = report.num_tasks - report.num_practised
    assert report.set_aside["never passes"] + report.set_aside.get("always passes", 0) == lost
    assert report.set_aside["never passes"] > 0
    assert report.set_aside["its key is held out"] > 0  # curation's own reasons stay
    told = report.reasons[-1]
    assert told.startswith("set aside: ")
    assert all(f"{count} x {reason}" in told for reason, count in report.set_aside.items())


async def test_a_second_turn_has_nothing_to_do(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    await run_once(loop)
    report = await run_once(loop)
    assert (report.ended, report.num_failures) == ("idle", 0)


async def test_late_feedback_still_counts(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    loop.store.tasks.put(holdout())
    engine = FakeEngine({"refund": 1.0})
    texts = [f"refund please number {i} item {i * 7}" for i in range(24)]
    await traffic(loop.store, engine, texts[:12], version=f"{LINE}@0", at=999_000.0)
    loop.store.jobs.put(LINE, "cursor", {"until": 999_999.0, "seen": []})
    from honed.types import Feedback

    rows = [
        Feedback(id=f"late{i}", target=f"trace_{LINE}@0_{i}", name="success", value=False, at=999_998.0)
        for i in range(12)
    ]
    loop.store.feedback.add(rows)
    assert (await run_once(loop)).num_failures == 12


async def test_too_few_failures_are_left_to_grow(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    loop = dataclasses.replace(loop, capture=CaptureSettings(min_failures=1000))
    report = await run_once(loop)
    assert report.ended == "idle"
    assert report.num_failures > 4
    assert report.signals["negative_feedback"] == report.num_failures
    assert not loop.runtime.learners  # type: ignore[attr-defined]


async def test_failures_of_a_version_that_no_longer_serves_do_not_count(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    await run_once(loop)
    engine = FakeEngine({"refund": 0.0})
    texts = [f"refund late number {i} item {i * 7}" for i in range(20)]
    await traffic(loop.store, engine, texts, version=f"{LINE}@0", at=1_000_001.0)
    assert (await run_once(loop)).num_failures == 0


class Forgetful(FakeTrainer):
    """A broken learning rate: every skill falls."""

    async def step(self, learning_rate: float | None = None) -> StepResult:
        """Forgets."""
        result = await super().step(learning_rate)
        self.skills = dict.fromkeys(self.skills, 0.01)
        return result


class ForgetfulRuntime(FakeRuntime):
    """Its trainers forget."""

    async def learner(self) -> Learner:
        """A learner with a broken trainer."""
        learner: Any = await super().learner()
        learner.trainer = Forgetful(self.root, learner.engine)
        return learner


async def test_a_bad_candidate_is_rejected_with_reasons_and_its_spend_restated(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    meter = Meter(load_book(), line=LINE)

    def rollouts(learner: Learner) -> Rollouts:
        return dataclasses.replace(rollouts_of(learner), meter=meter)

    runtime = ForgetfulRuntime(tmp_path / "blobs", {"order": 0.6, "refund": 0.2})
    loop = dataclasses.replace(loop, runtime=runtime, rollouts=rollouts)
    report = await run_once(loop)
    assert report.ended == "rejected"
    assert report.release is None
    assert loop.store.releases.current(LINE) is None
    assert any("target refunds" in reason for reason in report.reasons)
    totals = {(t.group["activity"], t.group["outcome"]): t for t in loop.store.ledger.totals(LINE)}
    assert totals["train", "rejected"].seconds > 0
    assert totals["train", "used"].seconds == pytest.approx(0)
    assert (await run_once(loop)).ended == "idle"


async def test_two_loops_on_one_line_are_refused(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    with loop.store.jobs.lock(LINE, "another"), pytest.raises(StoreError, match=r"held by 'another' \(pid"):
        await run_once(loop)


async def test_no_held_out_task_is_refused_before_any_compute(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    texts = [f"refund please number {i} item {i * 7}" for i in range(24)]
    await traffic(loop.store, FakeEngine({"refund": 0.0}), texts, version=f"{LINE}@0", at=999_000.0)
    with pytest.raises(ConfigError, match=r"gate\.target_suites"):
        await run_once(loop)
    assert not loop.runtime.learners  # type: ignore[attr-defined]
    assert loop.store.jobs.get(LINE, "turn") is None


async def test_a_gate_that_can_see_nothing_is_refused_before_any_compute(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path, gate=GateSettings(target_suites=("refunds",), hoped_gain=0.01))
    with pytest.raises(Refused, match="its gate could only waste money"):
        await run_once(loop)
    assert not loop.runtime.learners  # type: ignore[attr-defined]


async def test_a_group_of_one_is_refused_before_any_compute(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path, learn=LearnSettings(group_size=1))
    with pytest.raises(ConfigError, match=r"learn\.group_size"):
        await run_once(loop)


class Flaky(FakeTrainer):
    """Dies at a forward pass, once for all learners."""

    deaths = [3]

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Dies on the third call."""
        self.deaths[0] -= 1
        if self.deaths[0] == 0:
            raise EngineError("the learner was killed", retryable=True)
        return await super().forward_backward(samples, loss)


class FlakyRuntime(FakeRuntime):
    """Its first learner dies."""

    async def learner(self) -> Learner:
        """A learner that may die."""
        learner: Any = await super().learner()
        learner.trainer = Flaky(self.root, learner.engine)
        return learner


async def test_after_the_learner_died_the_turn_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = await run_once(await failing_line(tmp_path / "a"))
    loop = await failing_line(tmp_path / "b")
    loop = dataclasses.replace(loop, runtime=FlakyRuntime(tmp_path / "b" / "blobs", {"order": 0.6, "refund": 0.2}))
    Flaky.deaths[0] = 3
    with pytest.raises(EngineError):
        await run_once(loop)
    report = await run_once(loop)
    assert report.resumed
    assert (report.ended, report.rewards, report.losses) == (whole.ended, whole.rewards, whole.losses)
    stores = [make_loop(tmp_path / name).store for name in "ab"]
    assert stores[0].versions.get(LINE, 1).digest == stores[1].versions.get(LINE, 1).digest


async def test_a_turn_may_not_go_on_with_another_config(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    broken = FlakyRuntime(tmp_path / "blobs", {"order": 0.6, "refund": 0.2})
    Flaky.deaths[0] = 2
    with pytest.raises(EngineError):
        await run_once(dataclasses.replace(loop, runtime=broken))
    changed = dataclasses.replace(loop, recipe="recipe-2")
    with pytest.raises(Refused, match=r"recipe recipe-1, now recipe-2"):
        await run_once(changed)
    assert await abandon(changed)
    assert not await abandon(changed)
    assert (await run_once(changed)).ended == "idle"


async def test_a_release_that_came_first_is_not_overwritten(tmp_path: Path) -> None:
    """Somebody released another version while the gate ran: what was compared no longer serves."""
    loop = await failing_line(tmp_path)
    from honed.types import Release

    def on_event(event: str, fields: dict[str, Any]) -> None:
        if event == "gate.decided":
            loop.store.versions.put(Version(line=LINE, number=7, parent=0))
            other = Release(id="r7", line=LINE, version=f"{LINE}@7", kind="force", reason="by hand", at=1.0)
            loop.store.releases.put(other)

    report = await run_once(dataclasses.replace(loop, on_event=on_event))
    assert (report.ended, report.release) == ("invalid", None)
    current = loop.store.releases.current(LINE)
    assert current is not None
    assert current.version == f"{LINE}@7"


async def test_lessons_from_a_person_take_the_same_road(tmp_path: Path) -> None:
    from honed.loop.demonstrations import demonstrate
    from honed.testing import RENDERER

    loop = make_loop(tmp_path, gate=GateSettings(target_suites=("refunds",), guard_suites=("orders",), hoped_gain=0.5))
    loop.store.tasks.put(holdout())
    tasks = [fake_task(f"refund lesson {i}", split="train") for i in range(8)]
    shown = [
        demonstrate(RENDERER, task.prompt, (), (Message(role="assistant", content="right"),), line=LINE, at=1.0)
        for task in tasks
    ]
    report = await run_once(loop, Given(tasks=tasks, demonstrations=shown))
    assert (report.num_tasks, report.num_demonstrations, report.num_failures) == (8, 8, 0)
    assert report.version == f"{LINE}@1"


async def test_held_out_tasks_are_no_lessons(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    with pytest.raises(Refused, match="1 of 1 tasks to learn from are held out"):
        await run_once(loop, Given(tasks=[fake_task("refund 1", split="holdout")]))


async def test_nothing_to_learn_ends_the_turn_and_spends_the_failures(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path, base={"order": 0.6, "refund": 0.2})
    flat = Phase(algorithm=loop.practice.algorithm, learning_rate=1e-3)
    learn = LearnSettings(imitate=False, steps=2, groups_per_step=2, group_size=2, max_skipped=1, max_redraws=0)
    runtime = FakeRuntime(tmp_path / "blobs", {"order": 0.0, "refund": 0.0})
    loop = dataclasses.replace(loop, learn=learn, practice=flat, runtime=runtime)
    report = await run_once(loop)
    assert report.ended == "unlearned"
    assert "nothing could be learned" in report.reasons[0]
    assert (await run_once(loop)).ended == "idle"


async def test_a_refusal_in_learning_keeps_the_turn_its_failures_and_its_snapshots(tmp_path: Path) -> None:
    """Another number of attempts under the same recipe: the stored groups are not what the plan wants."""
    learn = LearnSettings(imitate=False, steps=3, groups_per_step=4, group_size=4)
    loop = await failing_line(tmp_path, learn=learn)
    runtime = FlakyRuntime(tmp_path / "blobs", {"order": 0.6, "refund": 0.2})
    Flaky.deaths[0] = 2
    with pytest.raises(EngineError):
        await run_once(dataclasses.replace(loop, runtime=runtime))
    before = loop.store.jobs.get(LINE, "turn")
    cursor = loop.store.jobs.get(LINE, "cursor")
    other = dataclasses.replace(loop, learn=loop.learn.model_copy(update={"group_size": 3}))
    with pytest.raises(Refused, match="and the plan wants 3 at"):
        await run_once(other)
    assert loop.store.jobs.get(LINE, "turn") == before
    assert loop.store.jobs.get(LINE, "cursor") == cursor
    assert Path(before["progress"]["snapshot"]["uri"]).exists()
    report = await run_once(loop)
    assert report.resumed
    assert report.version == f"{LINE}@1"


async def test_the_loop_runs_until_it_is_told_to_stop_and_survives_a_dead_learner(tmp_path: Path) -> None:
    loop = await failing_line(tmp_path)
    settings = loop.run.model_copy(update={"poll_seconds": 0.01, "retry_seconds": 0.01})
    runtime = FlakyRuntime(tmp_path / "blobs", {"order": 0.6, "refund": 0.2})
    loop = dataclasses.replace(loop, run=settings, runtime=runtime)
    Flaky.deaths[0] = 2
    stop, reports = asyncio.Event(), list[TurnReport]()

    def on_report(report: TurnReport) -> None:
        reports.append(report)
        stop.set()

    await run_forever(loop, stop=stop, on_report=on_report)
    assert [(report.ended, report.resumed) for report in reports] == [("promoted", True)]


@pytest.mark.parametrize("error", [ConfigError("curate.maker is empty"), NotFound("no such task")])
async def test_what_a_running_loop_refuses_is_said_and_does_not_end_it(tmp_path: Path, error: UserError) -> None:
    """A refusal that ended the loop with code 2 would end serving with it."""
    told, stop = list[str](), asyncio.Event()

    def on_event(event: str, fields: dict[str, Any]) -> None:
        told.append(f"{event}: {fields.get('reason')}")
        stop.set()

    def drain() -> int:
        raise error

    loop: Loop = dataclasses.replace(await failing_line(tmp_path), drain=drain, on_event=on_event)
    await run_forever(loop, stop=stop)
    assert told == [f"turn.refused: {error}"]
