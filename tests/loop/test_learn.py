"""SFT, then practice, to a Version; resumed from any saved progress to the very same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from honed import codec
from honed.algo.distill import Distill, DistillSettings
from honed.algo.grpo import Grpo, GrpoSettings
from honed.algo.sft import Sft
from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.errors import NotFound, NothingLearned
from honed.loop.curate import CurateSettings
from honed.loop.learn import Lesson, learn
from honed.loop.lessons import LearnSettings, Phase, Plan, Progress
from honed.protocols import Loss, Scores, StepResult
from honed.store import Store, open_store
from honed.testing import RENDERER, FakeRuntime, FakeTrainer, fake_task, read_fake, write_fake
from honed.types import Message, Sample, Task, Version

from .road import LINE, rollouts_of

SETTINGS = LearnSettings(steps=3, groups_per_step=3, group_size=4)
TASKS = [fake_task(f"refund order {i}", split="train") for i in range(6)]


def demonstrations(store: Store, num: int = 4) -> list[str]:
    """`num` refunds done right, in the store."""
    from honed.loop.demonstrations import demonstrate

    shown = [
        demonstrate(
            RENDERER,
            (Message(role="user", content=f"refund case {i}"),),
            (),
            (Message(role="assistant", content="right"),),
            line=LINE,
            at=1.0,
        )
        for i in range(num)
    ]
    for trace in shown:
        store.traces.put(trace)
    return [trace.id for trace in shown]


def plan_of(store: Store, tasks: Sequence[Task] = TASKS, num: int = 4, **changes: Any) -> Plan:
    store.tasks.put(tasks)
    plan = Plan(
        run="run_1",
        line=LINE,
        number=1,
        parent=Version(line=LINE, number=0),
        tasks=tuple(task.id for task in tasks),
        demonstrations=tuple(demonstrations(store, num)),
        seed=11,
        recipe="recipe",
    )
    return msgspec.structs.replace(plan, **changes)


async def lesson_of(store: Store, folder: Path, skill: float = 0.3, **changes: Any) -> Lesson:
    learner = await FakeRuntime(folder / "blobs", {"refund": skill}).learner()
    lesson = Lesson(
        store=store,
        trainer=learner.trainer,
        engine=learner.engine,
        rollouts=rollouts_of(learner),
        sft=Phase(algorithm=Sft(), learning_rate=2e-4, batch_size=2),
        practice=Phase(algorithm=Grpo(), learning_rate=5e-4),
        settings=SETTINGS,
        curate=CurateSettings(probe_attempts=4),
        base="base",
    )
    return dataclasses.replace(lesson, **changes)


class Saved:
    """Keeps every saved progress."""

    def __init__(self) -> None:
        self.all: list[Progress] = []

    async def __call__(self, progress: Progress) -> None:
        self.all.append(progress)


def skills(version: Version) -> dict[str, float]:
    return read_fake(Path(version.uri), version.digest)[0]


class Noted(FakeTrainer):
    """Keeps the learning rate of every step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rates: list[float] = []

    async def step(self, learning_rate: float | None = None) -> StepResult:
        self.rates.append(learning_rate or 0.0)
        return await super().step(learning_rate)


async def test_a_turn_is_warmed_up_once_and_not_again_for_practice(tmp_path: Path) -> None:
    store = open_store(None, tmp_path)
    lesson = await lesson_of(store, tmp_path)
    trainer = Noted(tmp_path / "blobs", lesson.engine)
    settings = SETTINGS.model_copy(update={"warmup_steps": 2})
    lesson = dataclasses.replace(lesson, trainer=trainer, settings=settings)
    await learn(lesson, plan_of(store), Progress(), Saved())
    assert trainer.rates == pytest.approx([2e-4 / 3, 4e-4 / 3, 5e-4, 5e-4, 5e-4])


async def test_a_version_comes_out_with_its_lineage(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    plan = plan_of(store)
    version, progress = await learn(await lesson_of(store, tmp_path), plan, Progress(), saved)
    assert (version.id, version.parent, version.base, version.recipe) == (f"{LINE}@1", 0, "base", "recipe")
    assert skills(version)["refund"] > 0.3
    groups = [group for step, _, group in store.groups.list("run_1") if step]
    taught = [*plan.demonstrations, *(trace.id for group in groups for trace in group.traces)]
    assert version.data == codec.digest(taught)
    assert store.versions.get(LINE, 1) == version
    assert {trace for trace, _, _ in store.versions.sources(version.id)} == set(taught)
    assert (progress.sft, progress.steps, progress.applied) == (2, 3, 5)
    assert len(progress.rewards) == 3
    assert len(progress.losses) == 5


async def test_resuming_from_any_saved_progress_gives_the_same_weights_and_practises_nothing_twice(
    tmp_path: Path,
) -> None:
    first, saved = open_store(None, tmp_path / "a"), Saved()
    whole, _ = await learn(await lesson_of(first, tmp_path / "a"), plan_of(first), Progress(), saved)
    assert len(saved.all) == 2 + 1 + 3  # two SFT steps, the probe, three steps of practice
    for index in range(len(saved.all)):
        folder = tmp_path / f"b{index}"
        store, cut = open_store(None, folder), Saved()
        plan = plan_of(store)

        async def die(progress: Progress, cut: Saved = cut, index: int = index) -> None:
            await cut(progress)
            if len(cut.all) == index + 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await learn(await lesson_of(store, folder), plan, Progress(), die)
        attempts = store.traces.count(origin="rollout")
        again, _ = await learn(await lesson_of(store, folder), plan, cut.all[-1], cut)
        assert again.digest == whole.digest
        assert again.data == whole.data
        assert store.traces.count(origin="rollout") == first.traces.count(origin="rollout") >= attempts


async def test_sparse_snapshots_give_the_same_weights(tmp_path: Path) -> None:
    digests = []
    for every in (1, 4):
        store, saved = open_store(None, tmp_path / str(every)), Saved()
        settings = SETTINGS.model_copy(update={"snapshot_every": every})
        lesson = await lesson_of(store, tmp_path / str(every), settings=settings)
        version, _ = await learn(lesson, plan_of(store), Progress(), saved)
        digests.append(version.digest)
    assert digests[0] == digests[1]


async def test_old_snapshots_are_deleted_and_the_last_one_is_kept(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    await learn(await lesson_of(store, tmp_path), plan_of(store), Progress(), saved)
    assert [path.name for path in (tmp_path / "blobs" / "runs" / "run_1").iterdir()] == ["5"]


async def test_a_parents_weights_are_continued(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    parent, _ = await learn(await lesson_of(store, tmp_path), plan_of(store), Progress(), saved)
    plan = plan_of(store, run="run_2", number=2, parent=parent)
    lesson = await lesson_of(store, tmp_path, settings=SETTINGS.model_copy(update={"steps": 0}))
    child, _ = await learn(lesson, plan, Progress(), saved)
    assert child.parent == 1
    assert skills(child)["refund"] > skills(parent)["refund"]


async def test_practice_alone_and_imitation_alone(tmp_path: Path) -> None:
    for name, settings, num in (("p", {"imitate": False}, 3), ("i", {"steps": 0}, 2)):
        store, saved = open_store(None, tmp_path / name), Saved()
        lesson = await lesson_of(store, tmp_path / name, settings=SETTINGS.model_copy(update=settings))
        _, progress = await learn(lesson, plan_of(store), Progress(), saved)
        assert progress.applied == num


async def test_tasks_that_always_or_never_pass_are_not_practised(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    hopeless = [fake_task(f"baggage case {i}", split="train") for i in range(3)]
    lesson = await lesson_of(store, tmp_path)
    lesson.engine.skills[""]["baggage"] = 0.0  # type: ignore[attr-defined]
    _, progress = await learn(lesson, plan_of(store, [*TASKS, *hopeless]), Progress(), saved)
    assert progress.practised is not None
    assert not {task.id for task in hopeless} & set(progress.practised)
    assert [store.tasks.state(task.id) for task in hopeless] == ["never"] * 3
    assert store.tasks.reason(hopeless[0].id) == f"0 of 4 attempts passed with {LINE}@0.2"
    practised = {group.task for step, _, group in store.groups.list("run_1") if step}
    assert practised <= set(progress.practised)


async def test_groups_that_all_score_alike_are_redrawn_a_bounded_number_of_times_then_named(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    settings = SETTINGS.model_copy(update={"steps": 9, "max_redraws": 2, "max_skipped": 2, "imitate": False})
    lesson = await lesson_of(store, tmp_path, 0.0, settings=settings, curate=CurateSettings(probe_attempts=0))
    with pytest.raises(NothingLearned) as caught:
        await learn(lesson, plan_of(store), Progress(), saved)
    assert "nothing could be learned" in str(caught.value)
    assert "fake with says_right" in str(caught.value)
    progress = saved.all[-1]
    assert (progress.skipped, progress.applied) == (2, 0)
    groups = store.groups.list("run_1")
    assert len(groups) == 2 * 3 * 3  # two steps, three draws, three groups
    assert progress.zero_variance == len(groups)
    assert not store.versions.list()


async def test_after_imitation_flat_practice_still_gives_a_version_and_says_so(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    tasks = [fake_task(f"baggage case {i}", split="train") for i in range(3)]
    lesson = await lesson_of(store, tmp_path, curate=CurateSettings(probe_attempts=0))
    lesson.engine.skills[""]["baggage"] = 0.0  # type: ignore[attr-defined]
    lesson = dataclasses.replace(lesson, settings=SETTINGS.model_copy(update={"steps": 9, "max_skipped": 2}))
    version, progress = await learn(lesson, plan_of(store, tasks), Progress(), saved)
    assert version.number == 1
    assert progress.applied == 2
    assert "all attempts at each task scored alike" in progress.notes[0]


async def test_the_policy_is_published_anew_for_every_step_and_the_last_one_forgotten(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    lesson = await lesson_of(store, tmp_path)
    await learn(lesson, plan_of(store), Progress(), saved)
    versions = {t.turns[0].versions[0].version for _, _, g in store.groups.list("run_1") for t in g.traces}
    assert versions == {f"{LINE}@0.{updates}" for updates in (2, 3, 4)}
    status = await lesson.engine.status()
    assert status.versions == (f"{LINE}@0.4",)


class Arrays(FakeTrainer):
    """Notes the arrays that samples came with."""

    seen: list[Sample]

    async def forward_backward(self, samples: Sequence[Sample], loss: Any) -> StepResult:
        """Keeps the samples."""
        self.seen = [*getattr(self, "seen", []), *samples]
        return await super().forward_backward(samples, loss)

    async def logprobs(self, samples: Sequence[Sample]) -> list[Scores]:
        """-1 everywhere."""
        return [Scores(values=[0.0, *[-1.0] * (len(s.tokens) - 1)], seconds=1.0) for s in samples]


PROXIMAL = Grpo(GrpoSettings(anchor="trainer"))


@pytest.mark.parametrize(("algorithm", "name"), [(PROXIMAL, "old_logprobs"), (Grpo(reference=True), "reference")])
async def test_arrays_that_an_algorithm_needs_are_filled(tmp_path: Path, algorithm: Grpo, name: str) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    lesson = await lesson_of(store, tmp_path, practice=Phase(algorithm=algorithm, learning_rate=1e-4))
    trainer = Arrays(tmp_path / "blobs", lesson.engine)  # type: ignore[arg-type]
    settings = SETTINGS.model_copy(update={"imitate": False})
    await learn(dataclasses.replace(lesson, trainer=trainer, settings=settings), plan_of(store), Progress(), saved)
    for sample in trainer.seen:
        filled = getattr(sample, name)
        assert filled.shape == sample.tokens.shape
        assert filled.dtype == np.float32
        assert filled[0] == 0.0


async def test_the_seconds_of_arrays_are_charged(tmp_path: Path) -> None:
    """A second a sample, and what the passes and steps of the fakes take."""
    store, saved = open_store(None, tmp_path), Saved()
    lesson = await lesson_of(store, tmp_path, practice=Phase(algorithm=PROXIMAL, learning_rate=1e-4))
    trainer, meter = Arrays(tmp_path / "blobs", lesson.engine), Meter(load_book(), line=LINE)  # type: ignore[arg-type]
    settings = SETTINGS.model_copy(update={"imitate": False})
    rollouts = dataclasses.replace(lesson.rollouts, meter=meter)
    lesson = dataclasses.replace(lesson, trainer=trainer, settings=settings, rollouts=rollouts)
    await learn(lesson, plan_of(store), Progress(), saved)
    trained = [entry.seconds for entry in store.ledger.list(LINE) if entry.activity == "train"]
    assert sum(trained) == pytest.approx(len(trainer.seen) + 3 * 0.011)


class Apart(FakeTrainer):
    """A trainer whose log-probabilities differ from the sampler's, more at every step."""

    passes = 0

    async def forward_backward(self, samples: Sequence[Sample], loss: Any) -> StepResult:
        """Says by how much."""
        self.passes += loss == "policy_gradient"
        found = await super().forward_backward(samples, loss)
        return msgspec.structs.replace(found, metrics={"mismatch_k3": 0.006 * self.passes, "mismatch_max": 1.0})


async def test_an_alarm_when_sampler_and_trainer_differ_sounds_once(tmp_path: Path) -> None:
    store, saved, events = open_store(None, tmp_path), Saved(), []
    lesson = await lesson_of(store, tmp_path)
    trainer = Apart(tmp_path / "blobs", lesson.engine)  # type: ignore[arg-type]
    lesson = dataclasses.replace(lesson, trainer=trainer, on_event=lambda event, fields: events.append((event, fields)))
    _, progress = await learn(lesson, plan_of(store), Progress(), saved)
    assert [fields["mismatch"] for event, fields in events if event == "learn.practised"] == [
        pytest.approx(value) for value in (0.006, 0.012, 0.018)
    ]
    assert progress.mismatch == pytest.approx(0.018)
    (note,) = progress.notes
    assert "differ by 0.012 a token at step 2, over learn.max_mismatch = 0.01" in note


async def test_each_kind_of_task_is_taught_by_its_own_version(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    tasks = [fake_task(f"refund order {i}", split="train") for i in range(2)]
    tasks += [fake_task(f"baggage {i}", split="train") for i in range(2)]
    distill = Distill(DistillSettings(teachers={"baggage": f"{LINE}@7", "*": f"{LINE}@6"}))
    lesson = await lesson_of(store, tmp_path, practice=Phase(algorithm=distill, learning_rate=1e-4))
    asked: list[str] = []

    async def logprobs(ids: Sequence[int], version: str, temperature: float = 1.0) -> Scores:
        asked.append(version)
        return Scores(values=[-float(version.rpartition("@")[2])] * (len(ids) - 1))  # tells the teachers apart

    lesson.engine.logprobs = logprobs  # type: ignore[method-assign]
    trainer = Arrays(tmp_path / "blobs", lesson.engine)  # type: ignore[arg-type]
    settings = SETTINGS.model_copy(update={"imitate": False, "steps": 1, "groups_per_step": 4})
    lesson = dataclasses.replace(lesson, trainer=trainer, settings=settings)
    plan = plan_of(store, tasks)
    with pytest.raises(NotFound, match=f"{LINE}@6"):
        await learn(lesson, plan, Progress(), saved)
    for number in (6, 7):
        files = write_fake(tmp_path / f"teacher-{number}", {"refund": 1.0}, {})
        store.versions.put(Version(line=LINE, number=number, uri=files.uri, digest=files.digest), {})
    await learn(lesson, plan, Progress(), saved)
    assert set(asked) == {f"{LINE}@6", f"{LINE}@7"}
    groups = {t.turns[-1].id: g.task for _, _, g in store.groups.list("run_1") for t in g.traces}
    for sample in trainer.seen:
        kind = store.tasks.find([groups[sample.branch]])[groups[sample.branch]].kind
        on = sample.weights != 0
        expected = -(7.0 if kind == "baggage" else 6.0) - sample.logprobs[on]
        assert sample.advantages[on] == pytest.approx(expected)


async def test_what_was_spent_is_in_the_ledger_under_the_candidate(tmp_path: Path) -> None:
    store, saved = open_store(None, tmp_path), Saved()
    lesson = await lesson_of(store, tmp_path)
    meter = Meter(load_book(), line=LINE)
    lesson = dataclasses.replace(lesson, rollouts=dataclasses.replace(lesson.rollouts, meter=meter))
    await learn(lesson, plan_of(store), Progress(), saved)
    entries = store.ledger.list(LINE)
    assert {entry.subject for entry in entries} == {f"{LINE}@1"}
    assert {entry.stage for entry in entries} == {"learn"}
    trained = [entry for entry in entries if entry.activity == "train"]
    assert len(trained) == 5
    assert sum(entry.seconds for entry in trained) == pytest.approx(5 * 0.011)
    attempts = [entry for entry in entries if entry.activity == "generate"]
    assert len(attempts) == store.traces.count(origin="rollout")


class Forgetting(Noted):
    """Notes what each step taught; thinks a trace the less likely, the later it comes in the alphabet."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taught: list[list[str]] = []
        self.asked: list[list[str]] = []

    async def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        self.taught.append(sorted(sample.branch for sample in samples))
        return await super().forward_backward(samples, loss)

    async def logprobs(self, samples: Sequence[Sample]) -> list[Scores]:
        order = sorted(sample.branch for sample in samples)
        self.asked.append(order)
        return [Scores(values=[-1.0 - order.index(s.branch)] * len(s.tokens), seconds=1.0) for s in samples]


@pytest.mark.parametrize("killed_after", [1, 2, 3, 99])
async def test_what_a_pass_rehearses_is_chosen_once_and_survives_a_crash(tmp_path: Path, killed_after: int) -> None:
    """Two passes over two demonstrations and four replayed conversations, of which three are asked."""
    store, saved = open_store(None, tmp_path), Saved()
    known = sorted(demonstrations(store, 6))
    plan = plan_of(store, num=0, demonstrations=tuple(known[:2]), replay=tuple(known[2:]))

    async def lesson() -> Lesson:
        made = await lesson_of(store, tmp_path, settings=SETTINGS.model_copy(update={"steps": 0}))
        sft = Phase(algorithm=Sft(), learning_rate=2e-4, batch_size=2, passes=2, candidates=3)
        return dataclasses.replace(made, sft=sft, trainer=Forgetting(tmp_path / "blobs", made.engine))

    async def save(progress: Progress) -> None:
        await saved(progress)
        if len(saved.all) == killed_after:
            raise KeyboardInterrupt

    first, second = await lesson(), await lesson()
    try:
        await learn(first, plan, Progress(), save)
    except KeyboardInterrupt:
        await learn(second, plan, saved.all[-1], save)
    taught, asked = [*first.trainer.taught, *second.trainer.taught], [*first.trainer.asked, *second.trainer.asked]
    assert [len(step) for step in taught] == [2, 2, 2, 2]
    (three,) = asked
    assert len(three) == 3
    again = {branch for step in taught[2:] for branch in step}
    assert set(three[1:]) <= again  # the two that lost most
    assert three[0] not in again
