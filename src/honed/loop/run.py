"""One turn of the loop, capture -> curate -> learn -> gate -> deploy, as a state that survives kill -9 at any instant.

The plan of a turn (tasks, demonstrations, seed, candidate number) is stored before learning; from then on every phase
stores what it did before the next begins, and a restart goes on from there. Capture and curation change nothing when
they run twice, so they need no state. Only one loop at a time may hold a line.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import msgspec

from honed import codec
from honed.errors import ConfigError, EngineError, HonedError, NothingLearned, Refused, StoreError, UserError
from honed.log import bind, log
from honed.loop import books, judge, lessons, planning
from honed.loop.deploy import deploy
from honed.loop.evaluate import Evaluation, evaluate
from honed.loop.learn import Lesson, Measure, learn
from honed.loop.lessons import Progress
from honed.loop.rollout import Rollouts
from honed.loop.turn import TURN, Ended, Given, Job, Loop, TurnReport, report_of
from honed.protocols import Learner
from honed.types import Decision, Task

REFUSED_SECONDS = 60.0
"""Wait after a turn that was refused: curating the same failures again costs, and mends nothing."""
ENDED: dict[Decision, Ended] = {
    "promote": "promoted",
    "reject": "rejected",
    "inconclusive": "inconclusive",
    "invalid": "invalid",
}


async def run_once(loop: Loop, given: Given | None = None) -> TurnReport:
    """One turn: the one that was cut off, if there is one, else a new one. Says what happened.

    Raises StoreError when another loop holds the line, ConfigError or Refused for a config that could only waste money
    (before any compute), EngineError(retryable=True) when the learner died: call again, and the turn goes on.
    """
    started = time.monotonic()
    with loop.store.jobs.lock(loop.line, f"loop {os.getpid()}"):
        cut_off = await _load(loop)
        resumed = cut_off is not None
        job = cut_off or await _begin(loop, given)
        if isinstance(job, TurnReport):
            return job
        if job.plan.recipe != loop.recipe:
            raise Refused(
                f"the turn {job.plan.run} of {loop.line!r} was begun with another config (recipe {job.plan.recipe}, "
                f"now {loop.recipe}). Finish it with that config, or abandon it (honed run --abandon)."
            )
        loop.on_event("turn.resumed" if resumed else "turn.began", {"run": job.plan.run, "phase": job.phase})
        with bind(run=job.plan.run):
            report = await _finish(loop, job, resumed)
        return msgspec.structs.replace(report, resumed=resumed, seconds=time.monotonic() - started)


async def run_forever(
    loop: Loop, *, stop: asyncio.Event, on_report: Callable[[TurnReport], None] | None = None
) -> None:
    """Turns until `stop` is set. A lost learner or store is retried with growing waits; a turn that is refused, by its
    config too, is said and waits for new traffic or a new config: the loop runs beside serving, which must go on."""
    failed = 0
    while not stop.is_set():
        wait = loop.run.poll_seconds
        try:
            report = await run_once(loop)
            failed = 0
            if on_report is not None and report.ended != "idle":
                on_report(report)
            wait = wait if report.ended == "idle" else 0.0
        except UserError as error:
            wait = max(wait, REFUSED_SECONDS)
            log("turn.refused", line=loop.line, reason=str(error))
            loop.on_event("turn.refused", {"reason": str(error)})
        except (EngineError, StoreError) as error:
            failed += 1
            wait = min(60.0, loop.run.retry_seconds * 2 ** (failed - 1))
            log("turn.interrupted", line=loop.line, error=str(error), retry_in_seconds=wait)
        await _wait(stop, wait)


async def abandon(loop: Loop, reason: str = "") -> bool:
    """Forgets a turn that was cut off; its tasks and groups stay, its spend becomes waste. Returns whether there was
    one."""
    with loop.store.jobs.lock(loop.line, f"loop {os.getpid()}"):
        job = await _load(loop)
        if job is None:
            return False
        await _waste(loop, job)
        await _close(loop, job)
        log("turn.abandoned", run=job.plan.run, reason=reason)
        return True


# --------------------------------------------------------------------------------- capture and curate: the plan


async def _begin(loop: Loop, given: Given | None) -> Job | TurnReport:
    """Plans a turn and stores the plan; a TurnReport when there is nothing to do."""
    lessons.check(loop.learn, loop.curate, loop.sft.batch_size)
    await asyncio.to_thread(_dev_tasks, loop)
    if loop.drain is not None:
        await asyncio.to_thread(loop.drain)
    job: Job | TurnReport
    if given is not None:
        job = await asyncio.to_thread(planning.from_given, loop, given)
    else:
        job = await asyncio.to_thread(planning.from_traffic, loop)
    if isinstance(job, Job):
        await asyncio.to_thread(judge.check, loop.store, job.plan.parent, loop.gate)
        await _save(loop, job)
    return job


# ----------------------------------------------------------------------------------------- learn, gate, deploy


async def _finish(loop: Loop, job: Job, resumed: bool) -> TurnReport:
    """The phases that are still due, each stored before the next."""
    if job.phase in ("learn", "gate"):
        began, started = time.time(), time.monotonic()
        learner = await loop.runtime.learner()
        rollouts = loop.rollouts(learner)
        try:
            if resumed:
                await books.recharge(loop.store, rollouts, job)
            if job.phase == "learn":
                done = await _learn(loop, job, learner, rollouts)
                if isinstance(done, TurnReport):
                    return done
                job = done
            bench = judge.Bench(loop.store, rollouts, loop.gate, seed=loop.learn.seed, on_event=loop.on_event)
            candidate = await asyncio.to_thread(loop.store.versions.find, job.version)
            verdict = await bench.judge(candidate, job.plan.parent, learner.engine, seed=job.plan.seed)
            job = msgspec.structs.replace(job, phase="deploy", verdict=verdict.id)
            await _save(loop, job)
        finally:
            await learner.close()
            await books.end_life(loop.store, rollouts, job, began=began, wall_seconds=time.monotonic() - started)
    return await _deploy(loop, job)


async def _learn(loop: Loop, job: Job, learner: Learner, rollouts: Rollouts) -> Job | TurnReport:
    lesson = Lesson(
        store=loop.store,
        trainer=learner.trainer,
        engine=learner.engine,
        rollouts=rollouts,
        sft=loop.sft,
        practice=loop.practice,
        settings=loop.learn,
        curate=loop.curate,
        base=loop.base,
        measure=await _measure(loop, job, rollouts),
        on_event=loop.on_event,
    )

    async def save(progress: Progress) -> None:
        await _save(loop, msgspec.structs.replace(job, progress=progress))

    try:
        version, progress = await learn(lesson, job.plan, job.progress, save)
    except NothingLearned as error:  # any other refusal leaves the turn as it is, to be mended or abandoned
        await rollouts.flush(loop.store, job.plan.candidate)
        await _waste(loop, job)
        await _close(loop, job)
        return report_of(job, "unlearned", reasons=(str(error),))
    manifest = codec.to_json({"version": version, "plan": job.plan, **loop.manifest})
    await asyncio.to_thread(loop.store.blobs.write, f"manifests/{version.line}/{version.number}.json", manifest)
    job = msgspec.structs.replace(job, phase="gate", version=version.id, progress=progress)
    await _save(loop, job)
    return job


async def _measure(loop: Loop, job: Job, rollouts: Rollouts) -> Measure | None:
    """How learning attempts its dev tasks; None where the config names none."""
    tasks = await asyncio.to_thread(_dev_tasks, loop)
    if not tasks:
        return None
    bench = judge.Bench(
        loop.store, rollouts, loop.gate, seed=loop.learn.seed, subject=job.plan.candidate, run=job.plan.run
    )

    async def measure(version: str) -> list[Evaluation]:
        return await evaluate(bench, version, tasks, attempts=loop.learn.dev_attempts, on_event=loop.on_event)

    return measure


def _dev_tasks(loop: Loop) -> list[Task]:
    """The tasks of learn.dev_suites. Raises ConfigError for a suite without any."""
    tasks: list[Task] = []
    for name in loop.learn.dev_suites:
        found = loop.store.tasks.list(split="dev", suite=name, state="ready")
        if not found:
            raise ConfigError(f"learn.dev_suites names {name!r}, which has no ready task of split dev.")
        tasks += found
    return tasks


async def _deploy(loop: Loop, job: Job) -> TurnReport:
    """Releases what the gate promoted, once: a release of this verdict that is there already is the one. Where nothing
    is released, all that the turn spent becomes waste."""
    store, verdict = loop.store, loop.store.verdicts.get(job.verdict)
    version, release = store.versions.find(job.version), None
    if verdict.decision == "promote":
        there = [row for row in store.releases.list(loop.line) if row.verdict == verdict.id]
        try:
            release = there[0] if there else await deploy(
                store, loop.line, version, verdict, clock=loop.clock, verify=loop.verify,
                timeout_seconds=loop.run.acknowledge_seconds,
            )  # fmt: skip
        except Refused as error:  # another release came first: what was compared is no longer what serves
            log("deploy.refused", version=version.id, reason=str(error))
            verdict = msgspec.structs.replace(verdict, reasons=(*verdict.reasons, str(error)))
    if release is None:
        await _waste(loop, job)
    how = "invalid" if verdict.decision == "promote" and release is None else ENDED[verdict.decision]
    await _close(loop, job)
    loop.on_event("turn.ended", {"run": job.plan.run, "ended": how, "version": version.id})
    return msgspec.structs.replace(
        report_of(job, how, reasons=verdict.reasons), version=version.id, verdict=verdict, release=release
    )


# --------------------------------------------------------------------------------------------------- the state


async def _load(loop: Loop) -> Job | None:
    value = await asyncio.to_thread(loop.store.jobs.get, loop.line, TURN)
    return None if value is None else msgspec.convert(value, Job)


async def _save(loop: Loop, job: Job) -> None:
    await asyncio.to_thread(loop.store.jobs.put, loop.line, TURN, msgspec.to_builtins(job))


async def _waste(loop: Loop, job: Job) -> None:
    await asyncio.to_thread(books.waste, loop.store, loop.line, job.plan.candidate, loop.clock.now())


async def _close(loop: Loop, job: Job) -> None:
    """Ends a turn: its failures are spent, its state and its snapshots go."""
    await asyncio.to_thread(planning.advance_cursor, loop, job.plan.until, job.failures)
    await asyncio.to_thread(loop.store.jobs.delete, loop.line, TURN)
    try:
        await asyncio.to_thread(loop.store.blobs.delete, f"runs/{job.plan.run}")
    except (HonedError, OSError) as error:
        log("turn.snapshots_kept", run=job.plan.run, error=str(error))


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return
