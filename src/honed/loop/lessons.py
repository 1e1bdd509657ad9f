"""What is learned in which step: settings of the learn phase, the plan that a turn fixes, and the order of its lessons.

Everything here is a pure function of the plan, so that a turn which was killed goes on with exactly the lessons that it
would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field

from honed.config import Settings
from honed.errors import ConfigError
from honed.loop.curate import CurateSettings
from honed.loop.evaluate import Evaluation
from honed.protocols import Algorithm, Snapshot
from honed.types import Noun, Version

T = TypeVar("T")
PROBE_STEP = 0
"""The step number under which a probe's groups are kept; practice starts at 1."""


class LearnSettings(Settings):
    """[learn]: how much is learned in one turn of the loop, and how fast."""

    seed: int = 0
    """Decides the order of lessons and every draw of practice."""
    imitate: bool = True
    """Learn from demonstrations and corrections, by SFT, before practice."""
    steps: int = Field(default=8, ge=0)
    """Steps of practice (reinforcement learning) after it; 0: none."""
    groups_per_step: int = Field(default=8, ge=1)
    """Tasks practised in one step."""
    group_size: int = Field(default=8, ge=1)
    """Attempts at each of them."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at a turn's beginning over which the learning rate rises linearly: a fresh AdamW's first steps are as long
    as any. A repair by 46 lessons kept a kind that it was shown all along at 90 % with 6 of them, at 10 % without."""
    max_redraws: int = Field(default=1, ge=0)
    """Further draws of tasks for a step whose groups all scored alike."""
    max_skipped: int = Field(default=3, ge=1)
    """Practice ends after this many steps in a row in which there was nothing to learn."""
    max_mismatch: float = Field(default=0.01, gt=0)
    """How far sampler and trainer may differ on the same weights before a step sounds the alarm: the mean over tokens
    of R - 1 - log R, R the ratio of their probabilities."""
    snapshot_every: int = Field(default=1, ge=1)
    """Steps between snapshots to resume from. Groups are kept in any case; what a crash costs is training time."""
    dev_suites: tuple[str, ...] = ()
    """Suites of split dev that are attempted before learning and after each phase, to show what each one added."""
    dev_attempts: int = Field(default=1, ge=1)
    """Attempts at each of their tasks, at the gate's temperature."""
    keep_optimiser: bool = False
    """Go on with the parent's optimiser state instead of a fresh one."""


class Measured(Evaluation, frozen=True, kw_only=True):
    """Success on a suite of dev tasks before learning, after SFT, or after practice."""

    after: Literal["nothing", "sft", "practice"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """An algorithm and its pace: `learning_rate` of each step; for SFT also the most traces per step, passes over them,
    the share of the steps at the end over which the rate falls, how many replayed conversations are asked before a pass
    how much they have suffered (0: none, replay is spread), and the seed of their order."""

    algorithm: Algorithm
    learning_rate: float
    batch_size: int = 8
    passes: int = 1
    decay: float = 0.0
    candidates: int = 0
    seed: int = 0


class Plan(Noun, frozen=True, kw_only=True):
    """What a turn learns, fixed and stored before it starts: `tasks` to practise, `demonstrations` and `replay` (trace
    ids) to imitate, `seed`, and the candidate's `number`. `parent` is the version that it starts from; `recipe` the
    digest of the config, which must not change under a running turn. `since` to `until` is the traffic looked at."""

    run: str
    line: str
    number: int
    parent: Version
    tasks: tuple[str, ...] = ()
    demonstrations: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    seed: int = 0
    recipe: str = ""
    since: float = 0.0
    until: float = 0.0

    @property
    def candidate(self) -> str:
        """The id of the version that the turn makes."""
        return f"{self.line}@{self.number}"

    @property
    def imitated(self) -> tuple[str, ...]:
        """The trace ids of the SFT phase."""
        return (*self.demonstrations, *self.replay)


class Progress(Noun, frozen=True, kw_only=True):
    """How far a turn has learned. Stored only together with the snapshot that it describes.

    `rehearsed` are the replayed conversations of the SFT pass that is under way (None: it has not begun).
    `practised` are the tasks that the probe left (None: not probed yet), `set_aside` counts the others; `skipped`
    counts steps without anything to learn, `skipped_now` those in a row; `rewards` is the mean score of each step of
    practice, `mismatch` the most by which sampler and trainer differed, `measured` what dev tasks said between phases.
    """

    sft: int = 0
    rehearsed: tuple[str, ...] | None = None
    practised: tuple[str, ...] | None = None
    set_aside: dict[str, int] = {}
    steps: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_now: int = 0
    zero_variance: int = 0
    faults: int = 0
    rewards: tuple[float, ...] = ()
    mismatch: float = 0.0
    losses: tuple[float, ...] = ()
    snapshot: Snapshot | None = None
    notes: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()

    @property
    def updates(self) -> int:
        """Steps done in both phases: what a policy between two versions is numbered by."""
        return self.sft + self.steps


def check(
    learn: LearnSettings, curate: CurateSettings, batch_size: int, passes: int = 1, *, comparing: bool = True
) -> None:
    """Refuses a config that could only waste money; `batch_size` and `passes` are SFT's, `comparing` says whether
    practice compares attempts. Raises ConfigError naming the keys."""
    if learn.steps and learn.group_size < 2 and comparing:
        raise ConfigError(
            f"learn.group_size = {learn.group_size} with learn.steps = {learn.steps}: a group of one has nothing to be "
            "compared with and its advantage is always 0. Set learn.group_size to at least 2, or learn.steps = 0."
        )
    if learn.steps and learn.groups_per_step > curate.max_tasks:
        raise ConfigError(
            f"learn.groups_per_step = {learn.groups_per_step} can never be filled with curate.max_tasks = "
            f"{curate.max_tasks}. Lower the first or raise the second."
        )
    if learn.imitate and batch_size > curate.max_demonstrations + -(-curate.replay // passes):
        raise ConfigError(
            f"sft.batch_size = {batch_size} can never be filled with curate.max_demonstrations = "
            f"{curate.max_demonstrations} and curate.replay = {curate.replay} spread over sft.passes = {passes}. "
            "Lower the first or raise another."
        )
    if curate.holdout_per_kind and not curate.holdout_share:
        raise ConfigError(
            f"curate.holdout_per_kind = {curate.holdout_per_kind} with curate.holdout_share = 0: no live conversation "
            "may be held out. Set curate.holdout_share above 0."
        )
    if not learn.steps and not learn.imitate:
        raise ConfigError("learn.steps = 0 and learn.imitate = false: nothing would be learned. Set one of them.")
    if learn.steps and curate.probe_attempts == 1:
        raise ConfigError(
            "curate.probe_attempts = 1: one attempt can't tell a task that always or never passes. "
            "Set it to at least 2, or to 0 for no probe."
        )


def pass_length(plan: Plan, phase: Phase) -> int:
    """SFT steps of one pass: enough for all demonstrations and a pass's share of the replay."""
    share = -(-len(plan.replay) // phase.passes)
    return -(-(len(plan.demonstrations) + share) // phase.batch_size)


def spread(plan: Plan, phase: Phase, number: int) -> list[str]:
    """The replay of a pass (from 0) where each conversation is met in one of them.

    So nothing is learned by heart: 32 conversations in each of three passes, and the model multiplied their kilograms
    right and all others wrong.
    """
    replay, size = shuffled(plan.replay, plan.seed, phase.seed, 4), len(plan.replay)
    return replay[size * number // phase.passes : size * (number + 1) // phase.passes]


def candidates(plan: Plan, phase: Phase, number: int) -> list[str]:
    """What of the replay is asked before a pass how much it has suffered: at least half as many again as are chosen."""
    least = -(-3 * -(-len(plan.replay) // phase.passes) // 2)
    return shuffled(plan.replay, plan.seed, phase.seed, 5, number)[: max(phase.candidates, least)]


def sft_pass(plan: Plan, phase: Phase, number: int, replay: Sequence[str]) -> list[list[str]]:
    """The trace ids of every step of a pass: all demonstrations and `replay`, each freshly shuffled and dealt out, so
    that every step has its part of both and none is short. A step of two traces would move the weights as far as any.
    """
    steps = pass_length(plan, phase)
    shown = shuffled(plan.demonstrations, plan.seed, phase.seed, 1, number)
    again = shuffled(replay, plan.seed, phase.seed, 6, number)
    return [shown[step::steps] + again[steps - 1 - step :: steps] for step in range(steps)]


def draw(tasks: Sequence[str], size: int, seed: int, stream: int, number: int) -> list[str]:
    """The `number`-th draw of `size` tasks from an endless row of shuffles: after any number of draws no task came more
    than once oftener than another, and none comes twice in a draw. Fewer tasks than `size`: all of them, every time.

    Each shuffle holds every task once. Where a draw runs over the end of one, the tasks that it has already step back
    in the next, behind those that fill it up; so the row is built from its beginning.
    """
    num, first = len(tasks), number * size
    if num <= size:
        return shuffled(tasks, seed, stream, number)
    row: list[str] = []
    while len(row) < first + size:
        begun = len(row) % size
        there = set(row[len(row) - begun :])
        order = shuffled(tasks, seed, stream, len(row) // num)
        ahead = [id for id in order if id not in there][: size - begun]
        row += [*ahead, *(id for id in order if id not in ahead)]
    return row[first : first + size]


def shuffled(items: Sequence[T], *seed: int) -> list[T]:
    """A permutation that depends on the seed's numbers alone."""
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]


def learning_rate(peak: float, step: int, warmup_steps: int, end: int = 0, decay: float = 0.0) -> float:
    """The rate of a turn's step (from 0): linear over the warm-up, then constant, and linear towards 0 over the share
    `decay` of a phase of `end` steps (warm-up, stable, decay: Hu et al. 2024)."""
    rising = min(1.0, (step + 1) / (warmup_steps + 1))
    falling = min(1.0, (end - step) / (int(end * decay) + 1)) if decay else 1.0
    return peak * rising * falling
