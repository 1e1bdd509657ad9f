"""The fourth arrow: from demonstrations and practice to a new Version, by SFT and then reinforcement learning.

Every step is `lesson -> samples -> forward_backward -> step -> snapshot -> save`. Lessons come from the plan
(lessons.py), groups from the buffer, which replays what a crash left; so a turn that is killed at any moment goes on to
the same weights. It knows no torch: the trainer sums losses, the algorithm has decided every weight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from honed import codec
from honed.errors import NothingLearned
from honed.log import log
from honed.loop import arrays, curate, lessons, rehearsal
from honed.loop.buffer import Buffer
from honed.loop.curate import CurateSettings
from honed.loop.evaluate import Evaluation
from honed.loop.lessons import PROBE_STEP, LearnSettings, Measured, Phase, Plan, Progress
from honed.loop.rollout import OnEvent, Rollouts, judged, silent
from honed.protocols import Algorithm, Distillation, Engine, Snapshot, StepResult, Trainer
from honed.store import Store
from honed.store.versions import Role
from honed.types import Group, Sample, Task, Trace, Version

Save = Callable[[Progress], Awaitable[None]]
Measure = Callable[[str], Awaitable[list[Evaluation]]]
"""Attempts the dev tasks with the weights that the engine holds under a name."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Everything that learning needs, as objects."""

    store: Store
    trainer: Trainer
    engine: Engine
    rollouts: Rollouts
    sft: Phase
    practice: Phase
    settings: LearnSettings = field(default_factory=LearnSettings)
    curate: CurateSettings = field(default_factory=CurateSettings)
    base: str = ""
    measure: Measure | None = None
    on_event: OnEvent = silent


async def learn(lesson: Lesson, plan: Plan, progress: Progress, save: Save) -> tuple[Version, Progress]:
    """Learns what is left of the plan after `progress`, saving after every snapshot, and stores the new Version.

    Raises NothingLearned without a demonstration or a group with two different scores, Refused when the store holds
    something else than the plan wants, and EngineError(retryable=True) when the learner died: call again with the last
    saved progress and a new learner.
    """
    return await _Learning(lesson, plan, progress, save).run()


class _Learning:
    """One turn's learning, from a progress to a version."""

    def __init__(self, lesson: Lesson, plan: Plan, progress: Progress, save: Save) -> None:
        self.lesson, self.plan, self.progress, self.save = lesson, plan, progress, save
        self.settings, self.store = lesson.settings, lesson.store
        self.published = ""
        self.buffer = Buffer(
            store=lesson.store, run=plan.run, seed=plan.seed, subject=plan.candidate, on_group=self._on_group
        )

    async def run(self) -> tuple[Version, Progress]:
        await self._find_teachers()
        await self._restore()
        await self._measure("nothing")
        await self._imitate()
        await self._measure("sft")
        await self._probe()
        await self._practise()
        await self._measure("practice")
        if not self.progress.applied:
            raise NothingLearned(
                f"nothing could be learned for {self.plan.line}@{self.plan.number}: {len(self.plan.imitated)} "
                f"demonstrations, {self.progress.skipped} steps of practice without a group of different scores. "
                + " ".join(self.progress.notes)
            )
        return await self._finish(), self.progress

    # -------------------------------------------------------------------------------------------- the phases

    async def _find_teachers(self) -> None:
        """A teacher that is missing is said before anything is spent."""
        algorithm = self.lesson.practice.algorithm
        if isinstance(algorithm, Distillation) and self.settings.steps:
            tasks = await asyncio.to_thread(self.store.tasks.find, self.plan.tasks)
            wanted = {algorithm.teacher(task.kind) for task in tasks.values()}
            await arrays.load_versions(self.lesson.engine, self.store, sorted(wanted))

    async def _restore(self) -> None:
        parent, snapshot = self.plan.parent, self.progress.snapshot
        if snapshot is not None:
            await self.lesson.trainer.restore(snapshot, optimiser=True)
        elif parent.number == 0:
            await self.lesson.trainer.restore(None)
        else:
            kept = Snapshot(uri=parent.uri, digest=parent.digest, optimiser=parent.optimiser, kind=parent.kind)
            await self.lesson.trainer.restore(kept, optimiser=self.settings.keep_optimiser)

    async def _imitate(self) -> None:
        plan, sft = self.plan, self.lesson.sft
        length = lessons.pass_length(plan, sft)
        total = sft.passes * length
        if not self.settings.imitate or self.progress.sft >= total:
            return
        shown = {id: await asyncio.to_thread(self.store.traces.get, id) for id in plan.imitated}
        while (step := self.progress.sft) < total:
            number, within = divmod(step, length)
            if within == 0 or self.progress.rehearsed is None:
                rehearsed = tuple(await self._choose(number, shown))
                self.progress = msgspec.structs.replace(self.progress, rehearsed=rehearsed)
            batch = lessons.sft_pass(plan, sft, number, self.progress.rehearsed or ())[within]
            rate = lessons.learning_rate(sft.learning_rate, step, self.settings.warmup_steps, total, sft.decay)
            result = await self._update(
                sft.algorithm, sft.algorithm([rehearsal.alone(shown[id]) for id in batch]), rate
            )
            self._tell("learn.imitated", step=step + 1, of=total, loss=result.loss, seconds=result.seconds)
            await self._advance(result, sft=step + 1, last=step + 1 == total)

    async def _choose(self, number: int, shown: Mapping[str, Trace]) -> list[str]:
        """What is replayed in a pass: in the first its even share, then what the passes before it hurt most."""
        plan, sft = self.plan, self.lesson.sft
        share = lessons.spread(plan, sft, number)
        if not number or not sft.candidates or not share:
            return share
        asked = [shown[id] for id in lessons.candidates(plan, sft, number)]
        lost, seconds = await rehearsal.losses(asked, sft.algorithm, self.lesson.trainer)
        await self._charge(seconds, tokens=0)
        self._tell("learn.rehearsed", of=number + 1, asked=len(asked), lost=float(np.mean(list(lost.values()))))
        return rehearsal.most_hurt(lost, len(share))

    async def _probe(self) -> None:
        """Sets aside what the policy that will practise always or never passes."""
        if self.progress.practised is not None:
            return
        tasks, attempts = self.plan.tasks, self.lesson.curate.probe_attempts
        if isinstance(self.lesson.practice.algorithm, Distillation):
            attempts = 0  # whatever a task scores, its teacher has something to say
        aside: dict[str, int] = {}
        if self.settings.steps and tasks and attempts:
            version = await self._publish()
            groups = await self._fill(PROBE_STEP, 0, tasks, version, attempts)
            worth, aside = await asyncio.to_thread(
                curate.set_aside, self.store, groups, self.lesson.curate, version=version
            )
            self._tell("learn.probed", tasks=len(tasks), practised=len(worth))
            tasks = tuple(worth)
        self.progress = msgspec.structs.replace(self.progress, practised=tasks, set_aside=aside)
        await self.save(self.progress)

    async def _practise(self) -> None:
        settings = self.settings
        while (step := self.progress.steps) < settings.steps and self.progress.practised:
            if self.progress.skipped_now >= settings.max_skipped:
                await self._give_up(step)
                return
            version = await self._publish()
            groups, samples = await self._lesson_of(step, version)
            scores = [score for group in groups for score in judged(group)]
            reward = float(np.mean(scores)) if scores else 0.0
            rate = lessons.learning_rate(
                self.lesson.practice.learning_rate, self.progress.updates, settings.warmup_steps
            )
            result = await self._update(self.lesson.practice.algorithm, samples, rate, groups)
            flat, faults = (
                sum(map(self.lesson.rollouts.flat, groups)),
                sum(t.fault is not None for g in groups for t in g.traces),
            )
            self._tell(
                "learn.practised", step=step + 1, of=settings.steps, reward=reward, groups=len(groups), flat=flat,
                faults=faults, loss=result.loss, skipped=result.skipped, seconds=result.seconds,
                mismatch=result.metrics.get("mismatch_k3", 0.0), mismatch_max=result.metrics.get("mismatch_max", 0.0),
            )  # fmt: skip
            self._watch_mismatch(step, result)
            self.progress = msgspec.structs.replace(
                self.progress,
                rewards=(*self.progress.rewards, reward),
                zero_variance=self.progress.zero_variance + flat,
                faults=self.progress.faults + faults,
            )
            await self._advance(result, steps=step + 1, last=step + 1 == settings.steps)

    def _watch_mismatch(self, step: int, result: StepResult) -> None:
        """An alarm when sampler and trainer disagree about the same tokens: then the gradient is another policy's."""
        found, limit = result.metrics.get("mismatch_k3", 0.0), self.settings.max_mismatch
        if found > limit and self.progress.mismatch <= limit:
            note = (
                f"Sampler and trainer differ by {found:.2g} a token at step {step + 1}, over learn.max_mismatch = "
                f"{limit:g}: the gradient is that of another policy. Look for what they compute differently; with "
                "GRPO, grpo.anchor = 'trainer' corrects for it."
            )
            log("learn.mismatch", note=note, k3=found, largest=result.metrics.get("mismatch_max"))
            self.progress = msgspec.structs.replace(self.progress, notes=(*self.progress.notes, note))
        self.progress = msgspec.structs.replace(self.progress, mismatch=max(found, self.progress.mismatch))

    async def _measure(self, after: Literal["nothing", "sft", "practice"]) -> None:
        """Success on dev tasks between the phases; a phase in which nothing was learned adds no figure."""
        progress, measure = self.progress, self.lesson.measure
        idle = {"nothing": False, "sft": not progress.sft, "practice": not progress.rewards}[after]
        if measure is None or idle or any(each.after == after for each in progress.measured):
            return
        if after == "nothing" and progress.updates:
            return
        evaluated = await measure(await self._publish())
        found = [Measured(after=after, **msgspec.structs.asdict(each)) for each in evaluated]
        for each in found:
            self._tell("learn.measured", **msgspec.to_builtins(each))
        self.progress = msgspec.structs.replace(progress, measured=(*progress.measured, *found))
        await self.save(self.progress)

    async def _lesson_of(self, step: int, version: str) -> tuple[list[Group], list[Sample]]:
        """The groups of a step of practice; drawn again, a bounded number of times, while all of them scored alike."""
        tasks, settings, seed = self.progress.practised or (), self.settings, self.plan.seed
        groups: list[Group] = []
        for redraw in range(settings.max_redraws + 1):
            stream, number = (2, step) if redraw == 0 else (3, step * settings.max_redraws + redraw - 1)
            drawn = lessons.draw(tasks, settings.groups_per_step, seed, stream, number)
            first = redraw * settings.groups_per_step
            groups += await self._fill(step + 1, first, drawn, version, settings.group_size)
            if samples := self.lesson.practice.algorithm(groups):
                return groups, samples
        return groups, []

    async def _give_up(self, step: int) -> None:
        tasks = await asyncio.to_thread(self.store.tasks.find, self.progress.practised or ())
        names = sorted({f"{task.environment} with {task.verifier}" for task in tasks.values()})
        note = (
            f"Practice ended at step {step}: in {self.progress.skipped_now} steps in a row all attempts at each task "
            f"scored alike ({', '.join(names)}). Make the tasks easier or harder, or raise learn.group_size."
        )
        log("learn.gave_up", note=note)
        self.progress = msgspec.structs.replace(
            self.progress, steps=self.settings.steps, notes=(*self.progress.notes, note)
        )
        await self._snapshot()

    async def _finish(self) -> Version:
        plan = self.plan
        snapshot = await self.lesson.trainer.snapshot(f"versions/{plan.line}/{plan.number}")
        rows = await asyncio.to_thread(self.store.groups.list, plan.run)
        practised = [trace.id for step, _, group in rows if step != PROBE_STEP for trace in group.traces]
        taught: dict[Role, Sequence[str]] = {"practice": practised}
        if self.settings.imitate:
            taught = {"demonstration": plan.demonstrations, "replay": plan.replay, **taught}
        version = Version(
            line=plan.line,
            number=plan.number,
            parent=plan.parent.number,
            kind=snapshot.kind,
            base=self.lesson.base,
            uri=snapshot.uri,
            digest=snapshot.digest,
            optimiser=snapshot.optimiser,
            recipe=plan.recipe,
            data=codec.digest([id for ids in taught.values() for id in ids]),
            at=plan.until,
        )
        await asyncio.to_thread(self.store.versions.put, version, taught)
        self._tell("learn.version", version=version.id, digest=version.digest)
        return version

    # ------------------------------------------------------------------------------------------- the steps

    async def _fill(self, step: int, first_slot: int, tasks: Sequence[str], version: str, attempts: int) -> list[Group]:
        found: dict[str, Task] = await asyncio.to_thread(self.store.tasks.find, tasks)
        slots = {first_slot + index: found[id] for index, id in enumerate(tasks)}
        return await self.buffer.fill(self.lesson.rollouts, step, slots, version, attempts)

    async def _update(
        self, algorithm: Algorithm, samples: list[Sample], rate: float, groups: Sequence[Group] = ()
    ) -> StepResult:
        """One optimiser step on the samples; without samples nothing is touched."""
        if not samples:
            return StepResult(skipped="no group had two different scores")
        lesson, kinds = self.lesson, dict[str, str]()
        if isinstance(algorithm, Distillation):
            tasks = await asyncio.to_thread(self.store.tasks.find, [group.task for group in groups])
            kinds = arrays.kinds_of(groups, {id: task.kind for id, task in tasks.items()})
        samples, filling = await arrays.fill(
            samples, algorithm, kinds, trainer=lesson.trainer, engine=lesson.engine, store=self.store,
            parent=self.plan.parent,
        )  # fmt: skip
        result = await self.lesson.trainer.forward_backward(samples, algorithm.loss)
        stepped = await self.lesson.trainer.step(rate)
        seconds = filling + result.seconds + stepped.seconds
        await self._charge(seconds, tokens=result.trained_tokens)
        skipped = result.skipped or stepped.skipped
        return msgspec.structs.replace(
            result, seconds=seconds, skipped=skipped, grad_norm=stepped.grad_norm or result.grad_norm
        )

    async def _charge(self, seconds: float, *, tokens: int) -> None:
        meter = self.lesson.rollouts.meter
        if meter is not None:
            meter.charge("train", seconds, tokens=tokens, line=self.plan.line)
            await self.lesson.rollouts.flush(self.store, self.plan.candidate)

    async def _advance(self, result: StepResult, *, last: bool, **done: int) -> None:
        """Counts a step; snapshots and saves when it is time to, or when the phase ends."""
        was = self.progress
        self.progress = msgspec.structs.replace(
            was,
            **done,
            applied=was.applied + (not result.skipped),
            skipped=was.skipped + bool(result.skipped),
            skipped_now=was.skipped_now + 1 if result.skipped and "steps" in done else 0,
            losses=(*was.losses, float(result.loss)),
        )
        if last or self.progress.updates % self.settings.snapshot_every == 0:
            await self._snapshot()

    async def _snapshot(self) -> None:
        """A state to resume from, saved with its progress; the one before it is deleted once nothing names it."""
        plan, old = self.plan, self.progress.snapshot
        name = f"runs/{plan.run}/{self.progress.updates}"
        snapshot = await self.lesson.trainer.snapshot(name)
        self.progress = msgspec.structs.replace(self.progress, snapshot=snapshot)
        await self.save(self.progress)
        if old is not None and old.uri != snapshot.uri:
            await asyncio.to_thread(self.store.blobs.delete, old.uri)

    async def _publish(self) -> str:
        """Gives the current weights to the rollout engine under the name `line@parent.updates`; forgets the last."""
        version = f"{self.plan.line}@{self.plan.parent.number}.{self.progress.updates}"
        if version != self.published:
            await self.lesson.trainer.publish(version)
            if self.published:
                await self.lesson.engine.unload(self.published)
            self.published = version
        return version

    def _on_group(self, step: int, group: Group, replayed: bool) -> None:
        scores = judged(group)
        self._tell("learn.group", step=step, task=group.task, scores=scores, replayed=replayed, size=len(group.traces))

    def _tell(self, event: str, **fields: Any) -> None:
        self.lesson.on_event(event, {"run": self.plan.run, **fields})
