"""How often one version passes a set of tasks, with an interval and what it cost. It compares no versions."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence

from honed import codec
from honed.economics.success import rate_interval
from honed.errors import EngineError
from honed.loop.rollout import OnEvent, Rollouts, lost, seed_of, silent
from honed.protocols import Engine, Job
from honed.store import Store
from honed.types import Noun, Task, Trace, Version


class Evaluation(Noun, frozen=True, kw_only=True):
    """A version on a suite: mean success over tasks with a 95 % interval (over tasks, so that repeated attempts at a
    task don't narrow it), how many attempts ended in a fault, and dollars (None: unpriced)."""

    suite: str
    num_tasks: int
    success: float | None
    low: float
    high: float
    faults: int
    dollars: float | None


async def evaluate(
    store: Store,
    rollouts: Rollouts,
    engine: Engine,
    version: Version,
    tasks: Sequence[Task],
    *,
    attempts: int = 1,
    pass_at: float = 1.0,
    seed: int = 0,
    on_event: OnEvent = silent,
) -> list[Evaluation]:
    """Attempts every task, stores the traces and their price, and sums up by suite, in the order of the suites' names.

    Raises EngineError(retryable=True) when the engine was lost.
    """
    if version.number:
        await engine.load(version)
    done = 0

    async def one(task: Task, number: int) -> Trace:
        nonlocal done
        draw = seed_of(seed, int(codec.digest(task.id)[:8], 16), number)
        key = f"evaluate/{version.id}/{codec.digest([seed, version.digest])[:12]}/{task.id}/{number}"
        tags = {"attempt": str(number)}
        trace = await rollouts.attempt(task, version.id, key, seed=draw, origin="eval", tags=tags)
        if lost(trace):
            raise EngineError(trace.fault.message if trace.fault else "the engine was lost", retryable=True)
        done += 1
        on_event("evaluate.progress", {"done": done, "of": len(tasks) * attempts})
        return trace

    traces = await rollouts.gather(
        [_job(one, task, number) for task in tasks for number in range(attempts)], rollouts.settings.concurrency
    )
    prices = {trace.id: _charge(rollouts, store, trace) for trace in traces}
    await rollouts.flush(store, version.id)
    suites = sorted({task.suite for task in tasks})
    return [_summary(suite, [t for t in tasks if t.suite == suite], traces, prices, pass_at) for suite in suites]


def _summary(
    suite: str, tasks: Sequence[Task], traces: Sequence[Trace], prices: dict[str, float | None], pass_at: float
) -> Evaluation:
    of_task = {task.id: [trace for trace in traces if trace.task == task.id] for task in tasks}
    rates = []
    for found in of_task.values():
        scores = [trace.score.value for trace in found if trace.score is not None and trace.fault is None]
        if scores:
            rates.append(statistics.fmean(score >= pass_at for score in scores))
    low, high = rate_interval(sum(rates), len(rates)) if rates else (0.0, 1.0)
    mine = [trace for found in of_task.values() for trace in found]
    priced = [prices[trace.id] for trace in mine]
    return Evaluation(
        suite=suite,
        num_tasks=len(tasks),
        success=statistics.fmean(rates) if rates else None,
        low=low,
        high=high,
        faults=sum(trace.fault is not None for trace in mine),
        dollars=None if any(price is None for price in priced) else sum(price for price in priced if price is not None),
    )


def _charge(rollouts: Rollouts, store: Store, trace: Trace) -> float | None:
    """Stores an attempt and prices its calls."""
    store.traces.put(trace)
    if rollouts.meter is None:
        return None
    prices = [entry.dollars for entry in rollouts.meter.charge_trace(trace, activity="eval")]
    return None if None in prices else sum(price for price in prices if price is not None)


def _job(one: Callable[[Task, int], Awaitable[Trace]], task: Task, number: int) -> Job:
    async def run() -> Trace:
        return await one(task, number)

    return run
