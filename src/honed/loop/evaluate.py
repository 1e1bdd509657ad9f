"""How often weights pass a set of tasks, with an interval and what it cost. It compares nothing.

Attempts are the gate's own kind (judge.py's Bench): at the serving temperature, each stored under a name of its own, so
that an evaluation which was cut off goes on with those that it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence

from honed.economics.success import rate_interval
from honed.loop.judge import Bench
from honed.loop.rollout import OnEvent, silent
from honed.protocols import Job
from honed.types import Noun, Task, Trace


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
    bench: Bench,
    version: str,
    tasks: Sequence[Task],
    *,
    attempts: int = 1,
    on_event: OnEvent = silent,
) -> list[Evaluation]:
    """Attempts every task with the weights that the engine holds under the name `version`, and sums up by suite, in the
    order of the suites' names.

    Raises EngineError(retryable=True) when the engine was lost.
    """
    done = 0

    async def one(task: Task, number: int) -> Trace:
        nonlocal done
        trace = await bench.attempt(task, version, number)
        done += 1
        on_event("evaluate.progress", {"done": done, "of": len(tasks) * attempts})
        return trace

    jobs = [_job(one, task, number) for task in tasks for number in range(attempts)]
    traces = await bench.rollouts.gather(jobs, bench.rollouts.settings.concurrency)
    prices = {trace.id: bench.price(trace) for trace in traces}
    suites = sorted({task.suite for task in tasks})
    pass_at = bench.settings.pass_at
    return [_summary(suite, [t for t in tasks if t.suite == suite], traces, prices, pass_at) for suite in suites]


def _summary(
    suite: str, tasks: Sequence[Task], traces: Sequence[Trace], prices: Mapping[str, float | None], pass_at: float
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


def _job(one: Callable[[Task, int], Awaitable[Trace]], task: Task, number: int) -> Job:
    async def run() -> Trace:
        return await one(task, number)

    return run
