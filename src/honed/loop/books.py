"""The books of a turn: what a killed one still owes, the idle of its learner, and the waste of what was not released.

Entries of kept attempts bear their turns' names (economics/meter.py), so that all of this may run twice. What a kill
takes with it for good is what only the dead process knew: CPU seconds of verifiers and training since the last entry,
and the idle of that life.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os

from honed.economics.meter import CORE, Meter, restate
from honed.loop.rollout import Rollouts
from honed.loop.turn import Job
from honed.store import Store
from honed.types import Trace


async def recharge(store: Store, rollouts: Rollouts, job: Job) -> None:
    """Charges a resumed turn's stored groups and gate attempts again: those that were stored and then not charged,
    because the loop was killed in between, get their entries; the others have theirs."""
    if rollouts.meter is None:
        return
    scratch = Meter(rollouts.meter.book, line=rollouts.line)  # they are no busy seconds of this life
    again = dataclasses.replace(rollouts, meter=scratch)
    for _, _, group in await asyncio.to_thread(store.groups.list, job.plan.run):
        again.charge(group)
    judged = await asyncio.to_thread(
        lambda: store.traces.list(origin="eval", line=job.plan.line, since=job.started, limit=None)
    )
    for trace in judged:
        if _is_of(trace, job):
            scratch.charge_trace(trace, activity="eval")
    await again.flush(store, job.plan.candidate)


async def end_life(store: Store, rollouts: Rollouts, job: Job, *, began: float, wall_seconds: float) -> None:
    """Charges what the learner reserved since `began` and did not use, and writes what is still owed."""
    if rollouts.meter is None:
        return
    served = await asyncio.to_thread(lambda: store.ledger.totals(by=("device",), since=began, stage="serve"))
    others = sum(total.seconds for total in served if total.group["device"] == CORE)
    rollouts.meter.idle(wall_seconds, machine=os.cpu_count() or 1, others=others)
    await rollouts.flush(store, job.plan.candidate)


def waste(store: Store, line: str, version: str, at: float) -> None:
    """Restates what was spent on a candidate as "rejected", unless it was released."""
    if any(release.version == version for release in store.releases.list(line)):
        return
    spent = store.ledger.list(line, stage="learn", subject=version)
    store.ledger.add(restate(spent, at=at))


def _is_of(trace: Trace, job: Job) -> bool:
    """Whether an attempt was made for this turn: by its candidate, its parent, or a policy between the two."""
    version, parent = trace.tags.get("version", ""), job.plan.parent.id
    return version in (job.plan.candidate, parent) or version.startswith(f"{parent}.")
