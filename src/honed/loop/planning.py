"""The beginning of a turn: capture and curate, then one plan of what is to be learned. Nothing here learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from honed import codec
from honed.clock import new_id
from honed.config import recipe_digest
from honed.errors import ConfigError, Refused
from honed.loop import capture, curate
from honed.loop.lessons import Plan
from honed.loop.turn import CURSOR, Given, Job, Loop, TurnReport, told_aside
from honed.store import Store
from honed.types import Task, Trace, Version


def from_traffic(loop: Loop) -> Job | TurnReport:
    """Flags, curates and plans what failed since the last turn; a TurnReport when that is too little."""
    now, parent = loop.clock.now(), serving(loop.store, loop.line)
    cursor = loop.store.jobs.get(loop.line, CURSOR) or {"until": 0.0, "seen": []}
    since = max(0.0, cursor["until"] - loop.run.late_seconds)
    seen = set(cursor["seen"])
    rules = recipe_digest(loop.capture)
    looked = cursor.get("looked", 0.0) if cursor.get("rules") == rules else 0.0
    flagged = capture.flag(loop.store, loop.line, since, loop.capture, looked=looked)
    loop.store.jobs.put(loop.line, CURSOR, {**cursor, "looked": now, "rules": rules})
    failures = [trace for trace in flagged if trace.id not in seen and answered_by(trace, parent)]
    signals = Counter(name for trace in failures for name in trace.signals)
    loop.on_event("turn.captured", {"failures": len(failures), "wanted": loop.capture.min_failures, **signals})
    told = TurnReport(ended="idle", line=loop.line, num_failures=len(failures), signals=dict(signals))
    if len(failures) < loop.capture.min_failures or not failures:
        return told
    if loop.maker is None:
        raise ConfigError("curate.maker is empty: nothing can turn these failures into tasks. Name a module:attribute.")
    found = curate.curate(
        loop.store, failures, loop.maker, loop.renderer, loop.curate, line=loop.line, since=cursor["until"]
    )
    loop.on_event("turn.curated", {"tasks": len(found.tasks), "demonstrations": len(found.demonstrations)})
    tasks = found.tasks[-loop.curate.max_tasks :]
    shown = found.demonstrations[-loop.curate.max_demonstrations :]
    replay = curate.replay(loop.store, loop.maker, loop.capture, loop.curate, line=loop.line, since=cursor["until"])
    spent = tuple(trace.id for trace in failures)
    if not tasks and not shown:
        advance_cursor(loop, now, spent)
        reasons = told_aside(found.set_aside)
        return msgspec.structs.replace(
            told, ended="unlearned", set_aside=found.set_aside, kinds=found.kinds, reasons=reasons
        )
    plan = _fix(loop, parent, tasks, shown, [trace.id for trace in replay], since=cursor["until"], until=now)
    return Job(
        phase="learn",
        plan=plan,
        failures=spent,
        signals=dict(signals),
        kinds=found.kinds,
        set_aside=found.set_aside,
        started=now,
    )


def from_given(loop: Loop, given: Given) -> Job:
    """A plan of what a person gives. Raises Refused for tasks that are held out."""
    parent = given.parent or serving(loop.store, loop.line)
    if stray := [task.id for task in given.tasks if task.split != "train"]:
        raise Refused(f"{len(stray)} of {len(given.tasks)} tasks to learn from are held out (first: {stray[0]}).")
    loop.store.tasks.put(given.tasks)
    for trace in given.demonstrations:
        loop.store.traces.put(trace)
    now = loop.clock.now()
    plan = _fix(loop, parent, given.tasks, given.demonstrations, [], since=now, until=now)
    return Job(phase="learn", plan=plan, started=now)


def _fix(
    loop: Loop,
    parent: Version,
    tasks: Sequence[Task],
    shown: Sequence[Trace],
    replay: Sequence[str],
    *,
    since: float,
    until: float,
) -> Plan:
    number = loop.store.versions.next_number(loop.line)
    return Plan(
        run=new_id("run_"),
        line=loop.line,
        number=number,
        parent=parent,
        tasks=tuple(task.id for task in tasks),
        demonstrations=tuple(trace.id for trace in shown),
        replay=tuple(replay),
        seed=int(codec.digest([loop.learn.seed, loop.line, number])[:7], 16),
        recipe=loop.recipe,
        since=since,
        until=until,
    )


def serving(store: Store, line: str) -> Version:
    """The version that serves a line: its current release's, else the base model."""
    release = store.releases.current(line)
    return store.versions.get(line, 0) if release is None else store.versions.find(release.version)


def answered_by(trace: Trace, version: Version) -> bool:
    """Whether the version gave the trace's newest answer; unknown counts as yes."""
    spans = trace.turns[-1].versions if trace.turns else ()
    name = spans[-1].version if spans else version.id
    return name == version.id or (version.number == 0 and name == "")


def advance_cursor(loop: Loop, until: float, spent: Sequence[str]) -> None:
    """Moves the cursor; remembers the failures that late feedback could bring up again."""
    cursor = loop.store.jobs.get(loop.line, CURSOR) or {"until": 0.0, "seen": []}
    kept = [*dict.fromkeys([*cursor["seen"], *spent])][-100_000:]
    loop.store.jobs.put(loop.line, CURSOR, {**cursor, "until": max(until, cursor["until"]), "seen": kept})
