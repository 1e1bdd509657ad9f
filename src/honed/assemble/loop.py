"""The loop's parts, joined: the learner's place to run, rollouts over its engine, evaluation, releases by hand."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import honed
from honed import codec, plugins
from honed.assemble.config import Config, check, recipe
from honed.assemble.model import open_store, prepared, price_book, renderer_of
from honed.assemble.practice import flat_by, practice_phase, sft_phase
from honed.economics.meter import Meter
from honed.engine.token_model import TokenModel
from honed.env.verify import VerifierHost
from honed.errors import ConfigError, Refused
from honed.loop import deploy
from honed.loop.demonstrations import demonstrate
from honed.loop.evaluate import Evaluation, evaluate
from honed.loop.judge import Bench
from honed.loop.rollout import OnEvent, Rollouts, Sessions, silent
from honed.loop.turn import Given, Loop
from honed.model import checkpoint
from honed.protocols import Environment, Learner, Runtime, Session
from honed.record import Drainer, RecordedSession
from honed.runtime.local import LocalRuntime
from honed.runtime.settings import LearnerSettings
from honed.store import Store
from honed.types import Message, Origin, Release, Sampling, Task, Trace, Version


def build_runtime(config: Config) -> Runtime:
    """Where learning runs: this machine, one learner child a turn."""
    root = Path(config.store.root)
    settings = LearnerSettings(
        blobs=str(_blob_folder(config)),
        train=config.train,
        lora=config.lora,
        engine=config.engine,
        precision=config.rollout.precision,
        niceness=config.learner.niceness,
        threads=config.learner.threads,
    )
    folder, log_path = root.absolute() / "run", root.absolute() / "log" / "learner.log"
    return LocalRuntime(config.model.source, settings, folder=folder, log_path=log_path)


def build_rollouts(config: Config, learner: Learner, runtime: Runtime, meter: Meter, host: VerifierHost) -> Rollouts:
    """What attempts need, over a learner's engine."""
    return Rollouts(
        line=config.model.line,
        sessions=_sessions(config, learner),
        environments=environment,
        scorer=host,
        gather=runtime.gather,
        settings=config.rollout,
        meter=meter,
        flat=flat_by(config),
    )


def _sessions(config: Config, learner: Learner) -> Sessions:
    renderer, line = renderer_of(config), config.model.line

    def make(
        task: Task, *, version: str, trace: str, sampling: Sampling, origin: Origin, tags: dict[str, str]
    ) -> Session:
        # A model of its own: attempts that begin alike must not be taken for each other's continuation.
        model = TokenModel(learner.engine, renderer, index_size=64)
        return RecordedSession(
            model, trace=trace, origin=origin, line=line, version=version, sampling=sampling, task=task.id
        )

    return make


def build_loop(config: Config, *, on_event: OnEvent = silent) -> Loop:
    """The loop of the config's line. Puts the config's held-out suites into the store; loads no model."""
    check(config)
    records, runtime = open_store(config), build_runtime(config)
    host = VerifierHost(config.learner.verifier_processes)
    meter = Meter(price_book(config), line=config.model.line, stage="learn", cores=reserved_cores(config))
    for task in suite_tasks(config):
        records.tasks.put([task])
    maker = plugins.resolve("maker", config.curate.maker) if config.curate.maker else None
    return Loop(
        line=config.model.line,
        store=records,
        runtime=runtime,
        rollouts=lambda learner: build_rollouts(config, learner, runtime, meter, host),
        sft=sft_phase(config),
        practice=practice_phase(config),
        maker=maker,
        renderer=renderer_of(config),
        capture=config.capture,
        curate=config.curate,
        learn=config.learn,
        gate=config.gate,
        run=config.run,
        recipe=recipe(config),
        manifest={"config": config.model_dump(mode="json"), "code": code()},
        base=prepared(config).digest,
        on_event=on_event,
        drain=Drainer(Path(config.store.root) / "capture", records).drain_once,
        verify=verify_version,
    )


def reserved_cores(config: Config) -> int:
    """Cores that the learner child may use at once, which is what its idle is counted on: its trainer's threads, or
    its engine's where those are more; 0 stands for the child's own number, and that for the machine's."""
    every = os.cpu_count() or 1
    own = config.learner.threads or every
    return min(every, max(config.train.threads or own, config.engine.threads or own))


@functools.cache
def code() -> dict[str, str]:
    """Which honed this is: its version, and the digest of its source files, which change without it."""
    return {"version": honed.__version__, "digest": source_digest(Path(honed.__file__).parent)}


def source_digest(package: Path) -> str:
    """A digest over the names and contents of a package's Python files."""
    files = {path.relative_to(package).as_posix(): path.read_bytes() for path in package.rglob("*.py")}
    return codec.digest({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})


def suite_tasks(config: Config) -> list[Task]:
    """The tasks of the config's suites. Raises ConfigError for one to learn from."""
    tasks: list[Task] = []
    for name in config.tasks.suites:
        found = list(plugins.resolve("suite", name)())
        if stray := [task.id for task in found if task.split == "train"]:
            raise ConfigError(
                f"tasks.suites: {name} yields {len(stray)} tasks of split train ({stray[0]}, ...); a suite judges, its "
                'tasks have split "dev" or "holdout".'
            )
        tasks += found
    return tasks


@functools.cache
def environment(name: str) -> Environment:
    """The environment that a task names: a plug-in's class (made once, without arguments) or an object of it."""
    found = plugins.resolve("environment", name)
    return found() if isinstance(found, type) else found


def verify_version(version: Version) -> None:
    """Reads a version's files against its digest. Raises CorruptData that names the file."""
    checkpoint.verify(Path(version.uri.removeprefix("file://")), version.digest)


def given_lessons(config: Config, loop: Loop, name: str) -> Given:
    """Lessons from a person: what module:function yields, each a Task or a (Task, messages that solve it) pair."""
    tasks: list[Task] = []
    shown: list[Trace] = []
    lesson_list: Iterable[Task | tuple[Task, Sequence[Message]]] = plugins.resolve("lessons", name)()
    for lesson in lesson_list:
        task, messages = (lesson, ()) if isinstance(lesson, Task) else lesson
        tasks.append(task)
        if messages and loop.renderer is not None:
            names = {"line": loop.line, "task": task.id}
            at, tags = loop.clock.now(), {"source": name}
            shown.append(demonstrate(loop.renderer, task.prompt, task.tools, messages, **names, tags=tags, at=at))
    if not tasks:
        raise Refused(f"{name} yields no lessons.")
    return Given(tasks=tasks, demonstrations=shown)


async def evaluate_version(
    config: Config,
    records: Store,
    version: Version,
    *,
    suite: str | None = None,
    split: str = "dev",
    attempts: int = 1,
    on_event: OnEvent = silent,
) -> list[Evaluation]:
    """A version on the store's tasks of a split, summed up by suite."""
    tasks = records.tasks.list(split=split, suite=suite, state="ready")
    runtime, host = build_runtime(config), VerifierHost(config.learner.verifier_processes)
    meter = Meter(price_book(config), line=version.line, stage="learn")
    learner = await runtime.learner()
    try:
        if version.number:
            await learner.engine.load(version)
        rollouts = build_rollouts(config, learner, runtime, meter, host)
        bench = Bench(records, rollouts, config.gate, seed=config.learn.seed, subject=version.id)
        return await evaluate(bench, version.id, tasks, attempts=attempts, on_event=on_event)
    finally:
        await learner.close()
        await host.close()


def release_version(config: Config, records: Store, version: Version, *, force: bool, reason: str) -> Release:
    """Lets a version serve; its newest promote verdict is what allows it, `force` with a reason what overrides."""
    verdicts = records.verdicts.list(version=version.id)
    verdict = verdicts[-1] if verdicts else None
    return asyncio.run(
        deploy.deploy(records, version.line, version, verdict, force=force, reason=reason, verify=verify_version)
    )


def rollback_version(config: Config, records: Store, line: str, *, reason: str) -> Release:
    """Takes a line back to the version before the one that serves."""
    return asyncio.run(deploy.rollback(records, line, reason))


def _blob_folder(config: Config) -> Path:
    if config.store.blobs is not None and "://" in config.store.blobs:
        raise ConfigError(f"store.blobs = {config.store.blobs!r}: learning on this machine writes to a folder.")
    return Path(config.store.blobs or Path(config.store.root) / "blobs").absolute()
