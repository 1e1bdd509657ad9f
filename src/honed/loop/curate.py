"""The second arrow: from conversations that failed to tasks that a program can check, and to demonstrations.

Failures choose which kinds of request are practised. What is held out is random traffic of those kinds whatever its
outcome, so that a better score means a better agent and not a regression to the mean. Near-duplicates share a fate:
none of them is practised when one of them is held out.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from pydantic import Field

from honed import codec
from honed.config import Settings
from honed.errors import HonedError, NotFound
from honed.log import log
from honed.loop import demonstrations
from honed.loop.capture import CaptureSettings
from honed.loop.demonstrations import Encoder
from honed.protocols import TaskMaker
from honed.store import Store
from honed.store.versions import Role
from honed.types import Feedback, Group, Noun, Task, Trace

WORD = re.compile(r"\w+")
IMITATED: tuple[Role, ...] = ("demonstration", "replay")


class CurateSettings(Settings):
    """[curate]: how failures become tasks."""

    maker: str = ""
    """TaskMaker (module:attribute) that turns a conversation into a task, or returns None."""
    similarity: float = 0.9
    """Prompts whose word triples overlap at least this much (Jaccard) are near-duplicates."""
    probe_attempts: int = 4
    """Attempts per new task, before practice; a task that always or never passes is set aside. 0: no probe."""
    pass_score: float = 1.0
    """An attempt passes with at least this score."""
    holdout_per_kind: int = 0
    """Held-out tasks drawn from live traffic of each failing kind, whatever the outcome; 0: only the suites given."""
    holdout_suite: str = "live"
    """Name of the suite of those."""
    holdout_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of live conversations (by the hash of their key) that are never practised; 0 where the suites given are
    made of other conversations than live traffic."""
    dev_share: float = Field(default=0.15, ge=0, lt=1)
    """Share that is kept for choosing settings, never practised either."""
    max_tasks: int = 256
    """At most this many tasks are practised in one turn of the loop, newest failures first."""
    max_demonstrations: int = 512
    """At most this many demonstrations are learned in one turn of the loop, newest first."""
    replay: int = 0
    """Passing production conversations that are mixed into SFT, against forgetting."""


class Curated(Noun, frozen=True, kw_only=True):
    """What came of some failures. `set_aside` counts, by reason, what did not become a task to practise."""

    tasks: tuple[Task, ...] = ()
    demonstrations: tuple[Trace, ...] = ()
    holdout: tuple[Task, ...] = ()
    kinds: dict[str, int] = {}
    set_aside: dict[str, int] = {}


def curate(
    store: Store,
    failures: Sequence[Trace],
    maker: TaskMaker,
    renderer: Encoder | None,
    settings: CurateSettings,
    *,
    line: str,
    since: float = 0.0,
) -> Curated:
    """Makes tasks and demonstrations of the failures and puts them into the store; idempotent.

    Only failures whose key falls in the train split, and that are near no held-out task, are practised or imitated.
    `renderer` None makes no demonstrations.
    """
    aside: Counter[str] = Counter()
    made = [(trace, task) for trace in failures if (task := make(maker, trace, settings)) is not None]
    aside["no program can check it"] += len(failures) - len(made)
    kinds = Counter(task.kind for _, task in made)
    holdout = sample_holdout(store, sorted(kinds), maker, settings, line=line, since=since)
    store.tasks.put(holdout)
    train = [(trace, task) for trace, task in made if task.split == "train"]
    aside["its key is held out"] += len(made) - len(train)
    fence = sealed(store, settings)
    clear = [(trace, task) for trace, task in train if not fence.near(task)]
    aside["near a held-out task"] += len(train) - len(clear)
    kept = keep_distinct([task for _, task in clear], settings.similarity, aside)
    store.tasks.put(kept)
    for task in kept:
        if store.tasks.state(task.id) in ("always", "never"):
            store.tasks.set_state(task.id, "ready", "it failed in production again")
    shown = demonstrate(store, clear, kept, renderer) if renderer is not None else []
    aside = Counter({reason: count for reason, count in aside.items() if count})
    log("curate.done", line=line, tasks=len(kept), demonstrations=len(shown), holdout=len(holdout), **kinds)
    return Curated(
        tasks=tuple(kept), demonstrations=tuple(shown), holdout=tuple(holdout), kinds=dict(kinds), set_aside=dict(aside)
    )


def make(maker: TaskMaker, trace: Trace, settings: CurateSettings) -> Task | None:
    """The maker's task with its content id and its split. A maker that raises is reported and makes nothing."""
    try:
        task = maker(trace)
    except Exception as error:  # the boundary: a plug-in that trips over one conversation must not stop the others
        log("curate.maker_raised", trace=trace.id, error=repr(error))
        return None
    if task is None or not task.verifier:
        return None
    task = msgspec.structs.replace(task, source=task.source or trace.id, split_key=task.split_key or trace.id)
    split = codec.split_of(task.split_key, holdout=settings.holdout_share, dev=settings.dev_share)
    return msgspec.structs.replace(task, id=codec.task_id(task), split=split)


class Fence:
    """Tasks that others of their kind must not come near."""

    def __init__(self, tasks: Iterable[Task], similarity: float) -> None:
        self._similarity = similarity
        self._words: dict[str, list[frozenset[str]]] = {}
        for task in tasks:
            self.add(task)

    def add(self, task: Task) -> None:
        """Fences one more task."""
        self._words.setdefault(task.kind, []).append(shingles(task))

    def near(self, task: Task) -> bool:
        """Whether the task is a near-duplicate of one of these."""
        return near(shingles(task), self._words.get(task.kind, ()), self._similarity)


def sealed(store: Store, settings: CurateSettings) -> Fence:
    """Around all that judges: held-out and dev tasks, retired ones too."""
    return Fence([*store.tasks.list(split="holdout"), *store.tasks.list(split="dev")], settings.similarity)


def learned(store: Store, maker: TaskMaker, settings: CurateSettings, *, line: str) -> Fence:
    """Around all that the line may have learned: tasks of the train split, and conversations that were imitated."""
    found = Fence(store.tasks.list(split="train"), settings.similarity)
    for version in store.versions.list(line):
        rows = [row for role in IMITATED for row in store.versions.sources(version.id, role=role)]
        for id, _, _ in rows:
            try:
                shown = store.traces.get(id)
                task = make(maker, store.traces.get(shown.tags.get("source", id)), settings)
            except NotFound:  # erased, or shown by a person
                continue
            if task is not None:
                found.add(task)
    return found


def keep_distinct(tasks: Iterable[Task], similarity: float, set_aside: Counter[str]) -> list[Task]:
    """Drops what repeats an earlier task, and counts it."""
    kept: list[Task] = []
    seen = Fence([], similarity)
    for task in tasks:
        if seen.near(task):
            set_aside["repeats another task"] += 1
        else:
            kept.append(task)
            seen.add(task)
    return kept


def shingles(task: Task) -> frozenset[str]:
    """The set of word triples of what the user wrote (case and punctuation do not count); short texts: the words."""
    text = " ".join(message.content or "" for message in task.prompt if message.role == "user")
    words = WORD.findall(text.casefold())
    triples = [" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))]
    return frozenset(triples)


def near(words: frozenset[str], others: Iterable[frozenset[str]], similarity: float) -> bool:
    """Whether the Jaccard index |A and B| / |A or B| with any of the others reaches `similarity`."""
    return any(len(words & other) >= similarity * len(words | other) for other in others)


def sample_holdout(
    store: Store, kinds: Sequence[str], maker: TaskMaker, settings: CurateSettings, *, line: str, since: float
) -> list[Task]:
    """Up to `holdout_per_kind` tasks of each kind from live traffic, good or bad, chosen by the hash of their id.

    One that is near to anything learned before is refused: it would ask what the candidate has been told.
    """
    if not settings.holdout_per_kind or not kinds:
        return []
    there = store.tasks.list(split="holdout", suite=settings.holdout_suite)
    have = Counter(task.kind for task in there)
    traffic = store.traces.list(origin="production", line=line, since=since, limit=10_000)
    tasks = {task.id: task for trace in traffic if (task := make(maker, trace, settings)) is not None}
    open = [tasks[id] for id in sorted(set(tasks) - {task.id for task in there}) if tasks[id].split == "holdout"]
    fence = learned(store, maker, settings, line=line) if open else Fence([], settings.similarity)
    found = []
    for task in open:
        if task.kind in kinds and have[task.kind] < settings.holdout_per_kind and not fence.near(task):
            have[task.kind] += 1
            found.append(msgspec.structs.replace(task, suite=settings.holdout_suite))
    return found


def demonstrate(
    store: Store, train: Sequence[tuple[Trace, Task]], kept: Sequence[Task], renderer: Encoder
) -> list[Trace]:
    """The corrections and demonstrations that people gave for these failures, as traces in the store."""
    by_target = {target: (trace, task) for trace, task in train for target in (trace.id, *(t.id for t in trace.turns))}
    ids = {task.id for task in kept}
    shown: dict[str, Trace] = {}
    for row in sorted(store.feedback.of(list(by_target)), key=lambda row: (row.at, row.id)):
        if row.kind in ("correction", "demonstration"):
            trace, task = by_target[row.target]
            found = _demonstration(renderer, trace, row, task if task.id in ids else None)
            if found is not None:
                shown[found.id] = found
    for found in shown.values():
        store.traces.put(found)
    return list(shown.values())


def _demonstration(renderer: Encoder, trace: Trace, row: Feedback, task: Task | None) -> Trace | None:
    try:
        return demonstrations.corrected(renderer, trace, row, task)
    except HonedError as error:
        log("curate.demonstration_refused", feedback=row.id, trace=trace.id, error=str(error))
        return None


def replay(
    store: Store, maker: TaskMaker, capture: CaptureSettings, settings: CurateSettings, *, line: str, since: float
) -> list[Trace]:
    """Up to `settings.replay` production conversations that went well since then, token-exact, none of them held out
    or near to what is.

    Only those of which the maker makes a task: where it makes none (a tool is gone), nobody will ask again. They are
    imitated beside the corrections against forgetting, and what is rare in traffic is forgotten first: every kind gives
    as many as it can up to an equal share, and within a kind each is as unlike those before it as can be.
    """
    if not settings.replay:
        return []
    good = {id for id, _, value, _ in store.feedback.live(line, name=capture.metric, since=since) if value >= 1.0}
    traces = store.traces.list(origin="production", line=line, since=since, limit=10_000)
    fit = [trace for trace in traces if trace.id in good and _exact(trace) and not trace.signals]
    fence, kinds = sealed(store, settings), dict[str, list[tuple[frozenset[str], Trace]]]()
    for trace in sorted(fit, key=lambda trace: codec.digest(trace.id)):
        task = make(maker, trace, settings)
        if task is not None and task.split == "train" and not fence.near(task):
            kinds.setdefault(task.kind, []).append((shingles(task), trace))
    rounds = itertools.zip_longest(*(spread(kinds[kind], settings.replay) for kind in sorted(kinds)))
    return [trace for row in rounds for trace in row if trace is not None][: settings.replay]


def spread(asked: Sequence[tuple[frozenset[str], Trace]], num: int) -> list[Trace]:
    """Up to `num` traces, from the first on always the one whose words are least like those of any chosen before
    (farthest-first traversal, Gonzalez 1985; Jaccard index of `asked`'s shingles; ties fall to the earlier)."""
    chosen: list[Trace] = []
    left = [(0.0, index) for index in range(len(asked))]
    while left and len(chosen) < num:
        _, picked = min(left)
        words, trace = asked[picked]
        chosen.append(trace)
        left = [(max(like, _jaccard(words, asked[i][0])), i) for like, i in left if i != picked]
    return chosen


def _jaccard(words: frozenset[str], others: frozenset[str]) -> float:
    return len(words & others) / len(words | others)


def _exact(trace: Trace) -> bool:
    return bool(trace.turns) and all(turn.fidelity == "tokens" and turn.output for turn in trace.turns)


def set_aside(
    store: Store, groups: Sequence[Group], settings: CurateSettings, *, version: str
) -> tuple[list[str], dict[str, int]]:
    """Judges a probe: tasks that always or never pass under `version` get that state and its reason.

    Returns the ids of the tasks worth practising, in the groups' order, and by reason how many are not. Faults do not
    count as attempts; a task with fewer than two judged attempts stays as it is and is practised.
    """
    worth: list[str] = []
    aside: Counter[str] = Counter()
    for group in groups:
        scores = [trace.score.value for trace in group.traces if trace.score is not None and trace.fault is None]
        passed = sum(score >= settings.pass_score for score in scores)
        if len(scores) >= 2 and len(set(scores)) == 1 and passed in (0, len(scores)):
            state = "always" if passed else "never"
            store.tasks.set_state(group.task, state, f"{passed} of {len(scores)} attempts passed with {version}")
            aside[f"{state} passes"] += 1
        else:
            worth.append(group.task)
    log("curate.probed", version=version, tasks=len(groups), practised=len(worth))
    return worth, dict(aside)
