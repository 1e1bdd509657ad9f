"""What a turn of the loop is made of: its parts (Loop), its stored state (Job), and what it reports (TurnReport)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from honed.clock import Clock, WallClock
from honed.config import Settings
from honed.loop.capture import CaptureSettings
from honed.loop.curate import CurateSettings
from honed.loop.demonstrations import Encoder
from honed.loop.gate import GateSettings
from honed.loop.lessons import LearnSettings, Measured, Phase, Plan, Progress
from honed.loop.rollout import OnEvent, Rollouts, silent
from honed.protocols import Learner, Runtime, TaskMaker
from honed.store import Store
from honed.types import Noun, Release, Task, Trace, Verdict, Version

Ended = Literal["idle", "unlearned", "promoted", "rejected", "inconclusive", "invalid"]
TURN, CURSOR = "turn", "cursor"
"""The keys under which the store's jobs keep a line's turn and what it has looked at."""


class RunSettings(Settings):
    """[run]: when the loop turns."""

    poll_seconds: float = 5.0
    """How often traffic is looked at while nothing is to be done."""
    late_seconds: float = 7 * 86400.0
    """Feedback that comes this much later than its conversation still counts."""
    acknowledge_seconds: float = 10.0
    """How long a release waits for the serving replicas to follow it; not following is told, and is no error."""
    retry_seconds: float = 2.0
    """Wait before the first retry after the learner or the store was lost; doubles up to a minute."""


class Job(Noun, frozen=True, kw_only=True):
    """A turn under way: the plan, the phase that is due, and what the phases before it produced."""

    phase: Literal["learn", "gate", "deploy"]
    plan: Plan
    progress: Progress = Progress()
    version: str = ""
    verdict: str = ""
    failures: tuple[str, ...] = ()
    signals: dict[str, int] = {}
    kinds: dict[str, int] = {}
    set_aside: dict[str, int] = {}
    started: float = 0.0


class TurnReport(Noun, frozen=True, kw_only=True):
    """What one turn of the loop did. `ended` "idle": too few failures; "unlearned": nothing in them to learn from.

    `signals` and `kinds` count conversations, `set_aside` also the tasks that the probe took out; `rewards` is the mean
    score of each step of practice, `losses` the loss of every step of both phases, `measured` the success on dev tasks
    between the phases; `resumed` says that a turn which was cut off was finished.
    """

    ended: Ended
    line: str
    run: str = ""
    version: str = ""
    verdict: Verdict | None = None
    release: Release | None = None
    num_failures: int = 0
    signals: dict[str, int] = {}
    kinds: dict[str, int] = {}
    set_aside: dict[str, int] = {}
    num_tasks: int = 0
    num_practised: int = 0
    num_demonstrations: int = 0
    rewards: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    measured: tuple[Measured, ...] = ()
    skipped: int = 0
    zero_variance: int = 0
    faults: int = 0
    reasons: tuple[str, ...] = ()
    resumed: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Everything a turn needs, as objects; assemble.py joins them.

    `rollouts` makes them for the learner of the turn. `drain` moves what the capture logs hold into the store.
    `manifest` is the full config, kept beside every version. `verify` checks a version's files before its release.
    """

    line: str
    store: Store
    runtime: Runtime
    rollouts: Callable[[Learner], Rollouts]
    sft: Phase
    practice: Phase
    maker: TaskMaker | None = None
    renderer: Encoder | None = None
    capture: CaptureSettings = field(default_factory=CaptureSettings)
    curate: CurateSettings = field(default_factory=CurateSettings)
    learn: LearnSettings = field(default_factory=LearnSettings)
    gate: GateSettings = field(default_factory=GateSettings)
    run: RunSettings = field(default_factory=RunSettings)
    recipe: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    clock: Clock = field(default_factory=WallClock)
    on_event: OnEvent = silent
    drain: Callable[[], Any] | None = None
    verify: Callable[[Version], object] | None = None


@dataclass(frozen=True, kw_only=True)
class Given:
    """Lessons from a person instead of from traffic (`honed train`): demonstration traces, tasks, or both.

    `parent` is the version to start from; None: the one that serves."""

    demonstrations: Sequence[Trace] = ()
    tasks: Sequence[Task] = ()
    parent: Version | None = None


def report_of(job: Job, ended: Ended, *, reasons: tuple[str, ...] = ()) -> TurnReport:
    """The report of a turn that ended so; its last reasons say what was not practised, and why."""
    progress = job.progress
    aside = {**job.set_aside, **progress.set_aside}
    return TurnReport(
        ended=ended,
        line=job.plan.line,
        run=job.plan.run,
        num_failures=len(job.failures),
        signals=job.signals,
        kinds=job.kinds,
        set_aside=aside,
        num_tasks=len(job.plan.tasks),
        num_practised=len(progress.practised or ()),
        num_demonstrations=len(job.plan.demonstrations),
        rewards=progress.rewards,
        losses=progress.losses,
        measured=progress.measured,
        skipped=progress.skipped,
        zero_variance=progress.zero_variance,
        faults=progress.faults,
        reasons=(*reasons, *progress.notes, *told_aside(aside)),
    )


def told_aside(aside: Mapping[str, int]) -> tuple[str, ...]:
    """What was set aside, as one sentence for people; nothing, if nothing was."""
    counts = ", ".join(f"{count} x {reason}" for reason, count in aside.items())
    return (f"set aside: {counts}",) if counts else ()
