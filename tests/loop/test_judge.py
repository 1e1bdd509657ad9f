"""The gate's bench: one verdict a candidate, and one slot of the holdout charged for it, whatever kills it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from honed.errors import Refused
from honed.loop.gate import GateSettings
from honed.loop.judge import Bench
from honed.store import Store, open_store
from honed.testing import FakeRuntime, write_fake
from honed.types import Version

from .road import LINE, holdout, rollouts_of

SETTINGS = GateSettings(target_suites=("refunds",), attempts=1, looks=False, hoped_gain=0.5, num_slots=1)
BASE = Version(line=LINE, number=0)


class Killed(Store):
    """Dies at the next write of a job while `kill` is set."""

    kill = True

    @classmethod
    def of(cls, store: Store) -> Killed:
        """The same store, dying."""
        killed = cls(store._database, store.root, store.blobs)
        keep = killed.jobs.put

        def put(line: str, key: str, value: dict[str, Any]) -> None:
            if killed.kill:
                raise KeyboardInterrupt
            keep(line, key, value)

        killed.jobs.put = put  # type: ignore[method-assign]
        return killed


def candidate(folder: Path, number: int, skill: float) -> Version:
    kept = write_fake(folder / f"v{number}", {"refund": skill, "order": 0.5}, {})
    return Version(line=LINE, number=number, parent=0, uri=kept.uri, digest=kept.digest)


async def test_a_kill_between_the_verdict_and_its_count_leaves_no_slot_uncharged(tmp_path: Path) -> None:
    plain = open_store(None, tmp_path)
    store = Killed.of(plain)
    store.tasks.put(holdout())
    learner = await FakeRuntime(tmp_path, {"refund": 0.2, "order": 0.5}).learner()
    bench = Bench(store, rollouts_of(learner), SETTINGS)
    first, second = candidate(tmp_path, 1, 0.25), candidate(tmp_path, 2, 0.3)
    with pytest.raises(KeyboardInterrupt):
        await bench.judge(first, BASE, learner.engine)
    assert len(store.verdicts.list()) == 1
    store.kill = False
    stored = store.verdicts.list()[0]
    assert await bench.judge(first, BASE, learner.engine) == stored
    assert await bench.judge(first, BASE, learner.engine) == stored  # and is charged once
    with pytest.raises(Refused, match="has judged 1 candidates"):
        await bench.judge(second, BASE, learner.engine)
