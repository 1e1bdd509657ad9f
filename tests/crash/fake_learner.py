"""The learner child of the crash tests: a fake trainer with real checkpoint folders, and a fake engine, over rpc."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from honed.protocols import Engine, Snapshot, StepResult, Trainer
from honed.runtime import learner
from honed.runtime.settings import LearnerSettings
from honed.testing import FakeEngine, FakeTrainer

BASE = {"order": 0.6, "refund": 0.2}


class SlowTrainer(FakeTrainer):
    """Takes a moment for everything, so that a kill can hit the middle of it."""

    async def step(self, learning_rate: float | None = None) -> StepResult:
        """One optimiser step."""
        await asyncio.sleep(0.005)
        return await super().step(learning_rate)

    async def snapshot(self, name: str) -> Snapshot:
        """A half-written folder for a moment, then a whole one."""
        folder = self.root / name
        if not (folder / "manifest.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "skills.json").write_bytes(b'{"half": ')
            await asyncio.sleep(0.01)
        return await super().snapshot(name)


async def make(source: str, settings: LearnerSettings) -> tuple[Engine, Trainer]:
    """The parts that the child serves."""
    engine = FakeEngine(BASE)
    return engine, SlowTrainer(Path(settings.blobs), engine)


if __name__ == "__main__":
    sys.exit(learner.main(maker=make))
