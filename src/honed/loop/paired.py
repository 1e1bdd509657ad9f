"""Both arms' attempts at the gate's tasks: running them, retrying faults, masking what stayed broken, pairing the rest.

No statistics and no decision here (loop/gate.py). An attempt is data: a fault is masked together with its partner of
the other arm, never taken for a zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from honed.types import Noun, Task, Trace

Slot = tuple[str, int]
Attempt = Callable[[Task, str, int], Awaitable[Trace]]
Progress = Callable[[int, int], None]
CANDIDATE, BASELINE = "candidate", "baseline"


class Pairs(Noun, frozen=True, kw_only=True):
    """Successes of both arms, [num_tasks, num_attempts] of 0, 1 or NaN where masked; weights and clusters [num_tasks].

    `faults` and `tries` count first tries by arm, `not_finite` the scores that were NaN or infinite.
    """

    candidate: np.ndarray
    baseline: np.ndarray
    weights: np.ndarray
    clusters: tuple[str, ...]
    kinds: tuple[str, ...]
    faults: dict[str, int]
    tries: dict[str, int]
    not_finite: int = 0

    @property
    def masked(self) -> float:
        """Share of pairs of which at least one side has no score."""
        return float(np.isnan(self.candidate + self.baseline).mean())

    def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per task with a pair left: the candidate's and the baseline's success; and the bool mask of these tasks."""
        lost = np.isnan(self.candidate + self.baseline)
        kept = ~lost.all(axis=1)
        candidate, baseline = (np.where(lost, np.nan, side)[kept] for side in (self.candidate, self.baseline))
        return np.nanmean(candidate, axis=1), np.nanmean(baseline, axis=1), kept

    def at_worst(self) -> np.ndarray:
        """Differences per task when a masked candidate's attempt counts 0 and a masked baseline's 1."""
        return np.nan_to_num(self.candidate, nan=0.0).mean(axis=1) - np.nan_to_num(self.baseline, nan=1.0).mean(axis=1)

    def variance_within(self) -> float:
        """Mean of p (1 - p) over the baseline's tasks, unbiased; .2 where one attempt each can't tell."""
        counts = (~np.isnan(self.baseline)).sum(axis=1)
        enough = counts > 1
        if not enough.any():
            return 0.2
        p = np.nanmean(self.baseline[enough], axis=1)
        return float(np.mean(p * (1 - p) * counts[enough] / (counts[enough] - 1)))


class Attempts:
    """Runs attempts of both arms, at most `concurrency` at a time, and keeps them by (task, number)."""

    def __init__(
        self,
        attempt: Attempt,
        candidate: str,
        baseline: str,
        *,
        cached: Mapping[Slot, Trace],
        retries: int,
        concurrency: int,
        expected: int,
        progress: Progress | None,
    ) -> None:
        self._attempt, self._ids = attempt, {CANDIDATE: candidate, BASELINE: baseline}
        self._retries, self._expected, self._progress = retries, expected, progress
        self._limit = asyncio.Semaphore(concurrency)
        self._done: dict[str, dict[Slot, Trace]] = {CANDIDATE: {}, BASELINE: {}}
        self._done[BASELINE].update({slot: trace for slot, trace in cached.items() if _scored(trace)})
        self._first_faults: dict[str, set[Slot]] = {CANDIDATE: set(), BASELINE: set()}
        self._ran: dict[str, set[Slot]] = {CANDIDATE: set(), BASELINE: set()}
        self.traces: list[Trace] = []

    async def run(self, tasks: Sequence[Task], numbers: Sequence[int]) -> None:
        """Makes sure that both arms have these attempts; whatever is there already is not run again.

        What an attempt raises (a lost engine) cancels the others and propagates as it is.
        """
        missing = [
            (arm, task, number)
            for number in numbers
            for task in tasks
            for arm in (BASELINE, CANDIDATE)
            if (task.id, number) not in self._done[arm]
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for arm, task, number in missing:
                    group.create_task(self._one(arm, task, number))
        except* Exception as errors:
            failed = errors.exceptions[0]
        else:
            return
        raise failed

    def baseline(self) -> dict[Slot, Trace]:
        """The baseline's scored attempts, cached ones included."""
        return {slot: trace for slot, trace in self._done[BASELINE].items() if _scored(trace)}

    def of(self, tasks: Sequence[Task]) -> list[Trace]:
        """The traces that ran now on these tasks, faults included."""
        ids = {task.id for task in tasks}
        return [trace for trace in self.traces if trace.task in ids]

    def pairs(self, tasks: Sequence[Task], num_attempts: int, pass_at: float) -> Pairs:
        """The first `num_attempts` attempts at `tasks` as arrays; a success is a score of at least `pass_at`."""
        slots = {(task.id, number) for task in tasks for number in range(num_attempts)}
        grids = {
            arm: np.array([[_success(done.get((task.id, n)), pass_at) for n in range(num_attempts)] for task in tasks])
            for arm, done in self._done.items()
        }
        seen = [trace for done in self._done.values() for slot, trace in done.items() if slot in slots]
        return Pairs(
            candidate=grids[CANDIDATE],
            baseline=grids[BASELINE],
            weights=np.array([task.weight for task in tasks], float),
            clusters=tuple(task.split_key for task in tasks),
            kinds=tuple(task.kind for task in tasks),
            faults={arm: len(self._first_faults[arm] & slots) for arm in grids},
            tries={arm: len(self._ran[arm] & slots) for arm in grids},
            not_finite=sum(trace.score is not None and not np.isfinite(trace.score.value) for trace in seen),
        )

    async def _one(self, arm: str, task: Task, number: int) -> None:
        slot = (task.id, number)
        async with self._limit:
            for tried in range(self._retries + 1):
                trace = await self._attempt(task, self._ids[arm], number)
                self.traces.append(trace)
                self._done[arm][slot] = trace
                if trace.fault is None and trace.score is not None:
                    break
                if tried == 0:
                    self._first_faults[arm].add(slot)
        self._ran[arm].add(slot)
        if self._progress is not None:
            self._progress(sum(map(len, self._ran.values())), self._expected)


def reusable(traces: Sequence[Trace], version: str) -> dict[Slot, Trace]:
    """Earlier attempts of `version` by (task, number), from traces whose tags say "version" and "attempt"."""
    return {
        (trace.task, int(trace.tags["attempt"])): trace
        for trace in traces
        if trace.task
        and trace.tags.get("version") == version
        and trace.tags.get("attempt", "").isdigit()
        and _scored(trace)
    }


def _scored(trace: Trace) -> bool:
    return trace.fault is None and trace.score is not None and bool(np.isfinite(trace.score.value))


def _success(trace: Trace | None, pass_at: float) -> float:
    if trace is None or not _scored(trace) or trace.score is None:
        return float("nan")
    return float(trace.score.value >= pass_at - 1e-9)
