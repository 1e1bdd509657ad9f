"""The gate: is the candidate better than what serves on sealed tasks, and no worse elsewhere? Deploy releases.

Both arms attempt the same held-out tasks at the serving temperature. The target must be won (paired sign-flip test over
clusters, alpha spent over looks and over the candidates that share the holdout); then every guard must be shown to lose
less than its margin. What is too small to prove anything is watched for harm only, and the verdict says so.

The loop's optimiser may learn "promoted" or "not promoted" from here and nothing else: its checkpoint choice and early
stopping read the dev split. The reasons are for people; the statistics are in economics/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from honed import codec
from honed.clock import Clock, WallClock
from honed.config import Settings, recipe_digest
from honed.economics import power, sequential
from honed.errors import ConfigError, Refused
from honed.loop.court import Court, Dollars, look_alphas, points, slot_alpha
from honed.loop.paired import Attempt, Attempts, Progress, Slot
from honed.types import Noun, Task, Trace, Verdict, Version


class GateSettings(Settings):
    """What a candidate must show."""

    attempts: int = Field(default=4, ge=1, le=64)
    """Attempts per task and arm."""
    target_suites: tuple[str, ...] = ()
    """Suites that must improve, tested together; empty: every suite that is no guard."""
    guard_suites: tuple[str, ...] = ()
    """Suites that must not fall; empty: every suite that is no target, if targets are named."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of both arms: serving's own, or the gate measures another model."""
    pass_at: float = 1.0
    """A score of at least this is a success."""
    hoped_gain: float = Field(default=0.2, gt=0, le=1)
    """The gain worth waiting for: a holdout that can't see it is refused, a candidate that excludes it is rejected.
    Where the baseline leaves less room than this, that room is hoped for instead."""
    smallest_gain: float = Field(default=0.0, ge=0, lt=1)
    """The gain that must be exceeded; 0: any improvement."""
    margin: float = Field(default=0.1, gt=0, le=1)
    """The loss on a guard that its owner tolerates. 64 tasks x 4 attempts can just prove 10 points."""
    alpha_policy: Literal["epoch", "single"] = "epoch"
    """"epoch": alpha is shared by all candidates that are judged on one holdout; "single": one candidate has it all."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of any false promotion in an epoch (or of this one, in single mode)."""
    num_slots: int = Field(default=20, ge=1)
    """Candidates that share one holdout before it must be renewed."""
    looks: bool = True
    """Stop after any round of attempts that decides; False: one test after the last."""
    min_clusters: int = Field(default=20, ge=2)
    """Fewest source conversations in the target of an epoch; single mode takes 8."""
    min_guard_power: float = Field(default=0.5, ge=0, le=1)
    """A guard with less planned power than this can't prove its margin and only raises alarms. More power
    saves good candidates; it makes no bad one pass."""
    harm_alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of a false alarm over all guard kinds and weak guards together (Holm)."""
    retries: int = Field(default=2, ge=0)
    """Further tries of an attempt that ended in a fault, before its pair is masked."""
    max_masked: float = Field(default=0.02, ge=0, le=1)
    """Share of masked pairs above which nothing is decided."""
    concurrency: int = Field(default=16, ge=1)
    """Attempts in flight."""
    always_guard: bool = False
    """Run the guards of a candidate that missed its target, for the record; costs their attempts."""
    allow_underpowered: bool = False
    """Run a comparison that the plan calls hopeless; the verdict says that it was."""


class GateResult(Noun, frozen=True, kw_only=True):
    """`baseline` are the baseline's attempts by (task id, attempt), to be given to the next gate of this holdout.
    `traces` are all attempts that ran now, faults included."""

    verdict: Verdict
    traces: tuple[Trace, ...]
    baseline: dict[Slot, Trace]


class Plan(Noun, frozen=True, kw_only=True):
    """What the comparison could see, before anything is spent. `problems` is empty when it may run."""

    num_tasks: int
    num_clusters: int
    alpha: float
    detectable: float
    problems: tuple[str, ...]


async def gate(
    candidate: Version,
    baseline: Version,
    tasks: Sequence[Task],
    attempt: Attempt,
    settings: GateSettings,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    baseline_traces: Mapping[Slot, Trace] | None = None,
    slot: int = 0,
    dollars_of: Dollars | None = None,
    clock: Clock | None = None,
) -> GateResult:
    """Compares `candidate` with `baseline` on held-out `tasks` and says promote, reject, inconclusive or invalid.

    `attempt(task, version id, number)` runs one scored attempt; equal numbers are equal seeds. `slot` counts the
    candidates already judged on this holdout. Raises ConfigError without held-out tasks, and Refused, before anything
    is spent, when the plan can't see the hoped gain (unless `allow_underpowered`) or all slots are used.
    """
    targets, guards = split_roles(tasks, settings)
    plan = make_plan(targets, settings)
    _check(plan, settings, slot)
    runner = Attempts(
        attempt,
        candidate.id,
        baseline.id,
        cached=baseline_traces or {},
        retries=settings.retries,
        concurrency=settings.concurrency,
        expected=2 * settings.attempts * (len(targets) + sum(map(len, guards.values()))),
        progress=progress,
    )
    court = Court(settings, plan.problems, runner, _seed(candidate, tasks, seed), dollars_of)
    decision = await court.decide(targets, guards)
    verdict = Verdict(
        id=verdict_id(candidate, baseline, tasks, settings),
        version=candidate.id,
        baseline=baseline.id,
        decision=decision,
        suites=tuple(court.suites),
        reasons=tuple(court.reasons),
        at=(clock or WallClock()).now(),
    )
    return GateResult(verdict=verdict, traces=tuple(runner.traces), baseline=runner.baseline())


def verdict_id(candidate: Version, baseline: Version, tasks: Sequence[Task], settings: GateSettings) -> str:
    """The same weights, baseline, holdout and rules have one verdict: look it up before running the gate again."""
    names = sorted(task.id for task in tasks)
    key = [candidate.digest or candidate.id, baseline.digest or baseline.id, names, recipe_digest(settings)]
    return "verdict_" + codec.digest(key)[:24]


def split_roles(tasks: Sequence[Task], settings: GateSettings) -> tuple[list[Task], dict[str, list[Task]]]:
    """The target's tasks and the guards' by suite. Raises ConfigError when held-out tasks are missing."""
    stray = [task.id for task in tasks if task.split != "holdout"]
    if stray:
        raise ConfigError(
            f"{len(stray)} of {len(tasks)} gate tasks are not held out (first: {stray[0]}): "
            "a gate sees only split holdout."
        )
    if len({task.id for task in tasks}) != len(tasks):
        raise ConfigError("a task is twice in the gate's list; every task counts once, with its weight.")
    wanted, kept = set(settings.target_suites), set(settings.guard_suites)
    if wanted & kept:
        raise ConfigError(f"gate.target_suites and gate.guard_suites both name {sorted(wanted & kept)}.")
    targets = [task for task in tasks if (task.suite in wanted if wanted else task.suite not in kept)]
    guards: dict[str, list[Task]] = {}
    for task in tasks:
        if task.suite in kept or (wanted and not kept and task.suite not in wanted):
            guards.setdefault(task.suite, []).append(task)
    if not targets:
        known = ", ".join(sorted({task.suite for task in tasks})) or "none"
        raise ConfigError(
            f"no held-out task belongs to the target: gate.target_suites = {list(wanted)}, "
            f"and the suites with held-out tasks are: {known}."
        )
    if missing := kept - set(guards):
        raise ConfigError(f"gate.guard_suites names {sorted(missing)}, which have no held-out task.")
    return targets, guards


def make_plan(tasks: Sequence[Task], settings: GateSettings) -> Plan:
    """Power of the target's test, from the number of tasks, clusters and attempts alone, so that it can be asked before
    anything is spent. Success rates are taken to be spread like Beta(2, 2); near 0 or 1 the test sees more."""
    clusters, alpha = {task.split_key for task in tasks}, slot_alpha(settings)
    error = power.planned_error(len(tasks), len(clusters), settings.attempts, settings.attempts)
    smallest = power.detectable(error, len(clusters), look_alphas(settings)[-1])
    problems = list(_cluster_problems(tasks, settings))
    if smallest > settings.hoped_gain:
        needed = power.tasks_needed(len(tasks), smallest, settings.hoped_gain)
        problems.append(
            f"{len(tasks)} held-out tasks x {settings.attempts} attempts see {points(smallest)} points "
            f"with 80 % power, not the hoped {points(settings.hoped_gain)}: it takes about {needed} tasks "
            f'(or a larger gate.attempts or gate.hoped_gain, or gate.alpha_policy = "single")'
        )
    return Plan(
        num_tasks=len(tasks), num_clusters=len(clusters), alpha=alpha, detectable=smallest, problems=tuple(problems)
    )


def _cluster_problems(tasks: Sequence[Task], settings: GateSettings) -> list[str]:
    shares: dict[str, float] = {}
    for task in tasks:
        shares[task.split_key] = shares.get(task.split_key, 0.0) + task.weight
    fewest = settings.min_clusters if settings.alpha_policy == "epoch" else min(8, settings.min_clusters)
    problems = []
    if len(shares) < fewest:
        problems.append(f"the target has {len(shares)} source conversations and needs {fewest} (gate.min_clusters)")
    heaviest = max(shares.values()) / sum(shares.values())
    if len(shares) >= fewest and heaviest > max(sequential.HEAVY_CLUSTER, 1.5 / len(shares)):
        problems.append(
            f"one source conversation carries {heaviest:.0%} of the target's weight; at most 10 % keeps the test fair"
        )
    return problems


def _check(plan: Plan, settings: GateSettings, slot: int) -> None:
    if settings.alpha_policy == "epoch" and slot >= settings.num_slots:
        raise Refused(
            f"this holdout has judged {slot} candidates (gate.num_slots = {settings.num_slots}): renew its tasks first."
        )
    if plan.problems and not settings.allow_underpowered:
        raise Refused(
            "the gate was not run, it could only waste money: "
            + "; ".join(plan.problems)
            + ". Set gate.allow_underpowered = true to run it all the same."
        )


def _seed(candidate: Version, tasks: Sequence[Task], seed: int) -> int:
    return int(codec.digest([candidate.digest or candidate.id, sorted(task.id for task in tasks), seed])[:12], 16)
