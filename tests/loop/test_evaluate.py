"""How often a version passes, by suite, with an interval over tasks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from honed.economics.meter import Meter
from honed.economics.prices import load_book
from honed.economics.success import rate_interval
from honed.errors import EngineError
from honed.loop.evaluate import evaluate
from honed.loop.gate import GateSettings
from honed.loop.judge import Bench
from honed.store import open_store
from honed.testing import FakeEngine, FakeRuntime, write_fake
from honed.types import Version

from .road import LINE, holdout, rollouts_of


async def test_success_by_suite_with_an_interval_over_tasks(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.0, "order": 1.0}).learner()
    rollouts = dataclasses.replace(rollouts_of(learner), meter=Meter(load_book(), line=LINE))
    base = Version(line=LINE, number=0)
    bench = Bench(store, rollouts, GateSettings(), subject=base.id)
    orders, refunds = await evaluate(bench, base.id, holdout(10), attempts=3)
    assert (orders.suite, orders.num_tasks, orders.success, orders.faults) == ("orders", 10, 1.0, 0)
    assert (orders.low, orders.high) == rate_interval(10, 10)  # ten tasks, not thirty attempts
    assert refunds.success == 0.0
    assert orders.dollars is not None
    assert orders.dollars > 0
    assert store.traces.count(origin="eval") == 60
    entries = store.ledger.list(LINE, subject=base.id)
    assert {entry.activity for entry in entries} == {"eval", "verify"}
    spent = sum(entry.dollars or 0.0 for entry in entries if entry.activity == "eval")
    assert orders.dollars + (refunds.dollars or 0.0) == pytest.approx(spent)


async def test_an_evaluation_that_was_cut_off_goes_on_with_its_attempts(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.5}).learner()
    assert isinstance(learner.engine, FakeEngine)
    first = await evaluate(Bench(store, rollouts_of(learner), GateSettings()), f"{LINE}@0", holdout(10)[:4])
    made = store.traces.count(origin="eval")
    again = await evaluate(Bench(store, rollouts_of(learner), GateSettings()), f"{LINE}@0", holdout(10)[:4])
    assert again == first
    assert store.traces.count(origin="eval") == made
    other = Bench(store, rollouts_of(learner), GateSettings(), run="run_2")
    await evaluate(other, f"{LINE}@0", holdout(10)[:4])  # a policy of another run may bear the same name
    assert store.traces.count(origin="eval") == 2 * made


async def test_a_trained_version_is_loaded_from_its_files(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.0}).learner()
    kept = write_fake(tmp_path / "v1", {"refund": 0.99, "order": 0.99}, {})
    version = Version(line=LINE, number=1, uri=kept.uri, digest=kept.digest)
    await learner.engine.load(version)
    found = await evaluate(Bench(store, rollouts_of(learner), GateSettings()), version.id, holdout(10))
    assert all(each.success is not None and each.success > 0.5 for each in found)
    assert found[0].dollars is None  # nobody metered it: unpriced, not free


async def test_a_lost_engine_is_no_score(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.0}).learner()
    assert isinstance(learner.engine, FakeEngine)
    learner.engine.broken = 10**6
    with pytest.raises(EngineError, match="the engine was killed"):
        await evaluate(Bench(store, rollouts_of(learner, engine_retries=0), GateSettings()), f"{LINE}@0", holdout(2))
