"""The loop process of the crash tests: one turn on the store in ROOT with fakes, its events as JSON lines on stdout.

`python -m crash.fake_loop ROOT` prepares the store (once) and turns; a learner that dies is replaced.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from loop.road import LINE, holdout, make_loop, rollouts_of, traffic

from honed.clock import WallClock
from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.errors import EngineError
from honed.loop.rollout import Rollouts
from honed.loop.run import run_once
from honed.loop.turn import Loop, RunSettings
from honed.protocols import Learner
from honed.runtime.local import LocalLearner, LocalRuntime
from honed.runtime.settings import LearnerSettings
from honed.testing import FakeEngine, FakeEnvironment
from honed.types import Task

from .fake_learner import BASE

METER = Meter(load_book(), line=LINE)


def tell(event: str, fields: dict[str, Any]) -> None:
    """One line on stdout."""
    print(json.dumps({"event": event, **fields}, default=str), flush=True)


class TellingRuntime(LocalRuntime):
    """Says which process the learner is."""

    async def learner(self) -> LocalLearner:
        """A new child."""
        found = await super().learner()
        tell("learner.up", {"pid": found.pid})
        return found


async def a_moment(task: Task) -> None:
    """Long enough for attempts to overlap with a kill."""
    await asyncio.sleep(0.002)


def rollouts(learner: Learner) -> Rollouts:
    """Rollouts in an environment that takes a moment."""
    made = rollouts_of(learner, FakeEnvironment(a_moment), engine_retries=0, concurrency=8)
    return dataclasses.replace(made, meter=METER)


def assemble(root: Path) -> Loop:
    """The loop of the crash tests."""
    settings = LearnerSettings(blobs=str(root / "blobs"), niceness=0)
    runtime = TellingRuntime(
        "fake", settings, folder=root / "run", log_path=root / "learner.log", module="crash.fake_learner"
    )
    run = RunSettings(acknowledge_seconds=0.0)
    return dataclasses.replace(
        make_loop(root), runtime=runtime, rollouts=rollouts, on_event=tell, clock=WallClock(), run=run
    )


async def main(root: Path) -> None:
    """One turn, however often the learner dies in it."""
    loop = assemble(root)
    if not loop.store.tasks.list():
        loop.store.tasks.put(holdout(24))
        texts = [f"{'refund' if i % 3 else 'order'} please number {i} item {i * 7}" for i in range(36)]
        await traffic(loop.store, FakeEngine(BASE), texts, version=f"{LINE}@0", at=999_000.0)
        tell("store.ready", {})
    while True:
        try:
            report = await run_once(loop)
            break
        except EngineError as error:
            tell("learner.lost", {"error": str(error)})
    tell("report", {"ended": report.ended, "run": report.run, "version": report.version, "resumed": report.resumed})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
