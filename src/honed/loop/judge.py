"""Brings a candidate before the gate: which tasks, which attempts, and what is already known from an earlier try.

The decision itself is gate.py's. Every attempt is stored under a name of its own before it counts, so that a gate which
was cut off goes on with the attempts that it has; equal numbers are equal seeds in both arms.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from honed import codec
from honed.errors import EngineError, NotFound, Refused
from honed.log import log
from honed.loop import gate as gates
from honed.loop.gate import GateSettings
from honed.loop.paired import Slot, reusable
from honed.loop.rollout import OnEvent, Rollouts, lost, seed_of, silent
from honed.protocols import Engine
from honed.store import Store
from honed.types import Sampling, Task, Trace, Verdict, Version


def holdout(store: Store, settings: GateSettings) -> list[Task]:
    """The held-out tasks that the gate may use: ready ones of the suites it names, all where it names none."""
    named = {*settings.target_suites, *settings.guard_suites}
    tasks = store.tasks.list(split="holdout", state="ready")
    both = bool(settings.target_suites) and bool(settings.guard_suites)
    return [task for task in tasks if task.suite in named] if both else tasks


def check(store: Store, parent: Version, settings: GateSettings) -> None:
    """Refuses, before any compute, a turn whose gate could not judge it. Raises ConfigError without held-out tasks, and
    Refused when they are too few to see the hoped gain."""
    targets, _ = gates.split_roles(holdout(store, settings), settings)
    plan = gates.make_plan(targets, settings)
    if plan.problems and not settings.allow_underpowered:
        raise Refused(
            f"no turn was begun from {parent.id}, its gate could only waste money: {'; '.join(plan.problems)}. "
            "Set gate.allow_underpowered = true to run it all the same."
        )


class Bench:
    """Runs gates, and single attempts in their manner. `seed` decides the draws of every attempt and is the same for
    all candidates of a line, so that the baseline's attempts serve more than one of them.

    `subject` is the version that pays until a gate names its candidate; `run` sets apart the attempts of policies
    between two versions, whose names come again in other runs.
    """

    def __init__(
        self,
        store: Store,
        rollouts: Rollouts,
        settings: GateSettings,
        *,
        seed: int = 0,
        subject: str = "",
        run: str = "",
        on_event: OnEvent = silent,
    ) -> None:
        self.rollouts, self.settings = rollouts, settings
        self._store, self._seed, self._on_event, self._subject = store, seed, on_event, subject
        self._tries: Counter[tuple[str, str, int]] = Counter()
        self._manner = codec.digest([settings.temperature, rollouts.settings.max_tokens, seed, run])[:12]

    async def judge(self, candidate: Version, baseline: Version, engine: Engine, *, seed: int = 0) -> Verdict:
        """The gate's verdict on `candidate` against `baseline`, stored. One that is stored already is returned.

        `seed` is the statistics' own. Raises EngineError(retryable=True) when the engine was lost, and what
        gate raises.
        """
        store, line, self._subject = self._store, candidate.line, candidate.id
        tasks = await asyncio.to_thread(holdout, store, self.settings)
        id = gates.verdict_id(candidate, baseline, tasks, self.settings)
        if (stored := await asyncio.to_thread(_stored, store, id)) is not None:
            await asyncio.to_thread(_count, store, line, tasks, stored)  # a kill may have come between the two
            return stored
        for arm in (baseline, candidate):
            if arm.number:
                await engine.load(arm)
        self._on_event("gate.began", {"version": candidate.id, "baseline": baseline.id, "tasks": len(tasks)})
        result = await gates.gate(
            candidate,
            baseline,
            tasks,
            self.attempt,
            self.settings,
            seed=seed,
            progress=lambda done, of: self._on_event("gate.progress", {"done": done, "of": of}),
            baseline_traces=await asyncio.to_thread(self._known, baseline),
            slot=await asyncio.to_thread(_judged, store, line, tasks),
        )
        await asyncio.to_thread(store.verdicts.put, result.verdict)
        await asyncio.to_thread(_count, store, line, tasks, result.verdict)
        log("gate.decided", version=candidate.id, decision=result.verdict.decision)
        self._on_event("gate.decided", {"version": candidate.id, "decision": result.verdict.decision})
        return result.verdict

    async def attempt(self, task: Task, version: str, number: int) -> Trace:
        """One stored attempt; asking again for the same one makes a further try, as after a fault."""
        place = (version, task.id, number)
        tried, self._tries[place] = self._tries[place], self._tries[place] + 1
        key = f"gate/{self._manner}/{version}/{task.id}/{number}/{tried}"
        try:
            return await asyncio.to_thread(self._store.traces.get, trace_id(key))
        except NotFound:
            pass
        seed = seed_of(self._seed, int(codec.digest(task.id)[:8], 16), number, tried)
        sampling = Sampling(
            temperature=self.settings.temperature, max_tokens=self.rollouts.settings.max_tokens, seed=seed
        )
        tags = {"attempt": str(number), "manner": self._manner}
        trace = await self.rollouts.attempt(task, version, key, origin="eval", tags=tags, sampling=sampling)
        if lost(trace):
            raise EngineError(trace.fault.message if trace.fault else "the engine was lost", retryable=True)
        await asyncio.to_thread(self._store.traces.put, trace)
        if (meter := self.rollouts.meter) is not None:
            meter.charge_trace(trace, activity="eval")
            await self.rollouts.flush(self._store, self._subject)
        return trace

    def price(self, trace: Trace) -> float | None:
        """What an attempt cost in dollars; None: unpriced."""
        return None if self.rollouts.meter is None else self.rollouts.meter.quote(trace)

    def _known(self, baseline: Version) -> dict[Slot, Trace]:
        traces = self._store.traces.list(origin="eval", line=baseline.line, limit=100_000, with_turns=False)
        return reusable([trace for trace in traces if trace.tags.get("manner") == self._manner], baseline.id)


def trace_id(key: str) -> str:
    """The id of the attempt that a key names."""
    return "trace_" + codec.digest(["rollout", key])[:32]


def _epoch(tasks: list[Task]) -> str:
    return "holdout-" + codec.digest(sorted(task.id for task in tasks))[:16]


def _stored(store: Store, id: str) -> Verdict | None:
    try:
        return store.verdicts.get(id)
    except NotFound:
        return None


def _judged(store: Store, line: str, tasks: list[Task]) -> int:
    """How many candidates this holdout has judged."""
    return len((store.jobs.get(line, _epoch(tasks)) or {"verdicts": []})["verdicts"])


def _count(store: Store, line: str, tasks: list[Task], verdict: Verdict) -> None:
    """Charges the holdout's slot for a verdict, once however often it is called."""
    known = (store.jobs.get(line, _epoch(tasks)) or {"verdicts": []})["verdicts"]
    store.jobs.put(line, _epoch(tasks), {"verdicts": [*dict.fromkeys([*known, verdict.id])]})
