"""Complete groups are replayed from the store and never sampled again."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.errors import EngineError, Refused
from honed.loop.buffer import Buffer
from honed.store import open_store
from honed.testing import FakeEngine, FakeEnvironment, FakeRuntime, fake_task
from honed.types import Group, Task

from .road import rollouts_of

TASKS = {slot: fake_task(f"refund order {slot}", split="train") for slot in range(4)}


async def test_what_is_in_the_store_is_not_sampled_again(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.5}).learner()
    environment = FakeEnvironment()
    seen: list[bool] = []
    buffer = Buffer(store=store, run="r", seed=1, on_group=lambda step, group, replayed: seen.append(replayed))
    rollouts = rollouts_of(learner, environment)
    half = await buffer.fill(rollouts, 1, {slot: TASKS[slot] for slot in (0, 2)}, "", 3)
    assert len(environment.ran) == 6
    whole = await buffer.fill(rollouts, 1, TASKS, "", 3)
    assert len(environment.ran) == 12
    assert [group.task for group in whole] == [task.id for task in TASKS.values()]
    assert [whole[0].id, whole[2].id] == [group.id for group in half]
    assert await buffer.fill(rollouts, 1, TASKS, "", 3) == await buffer.fill(rollouts, 1, TASKS, "", 3)
    assert len(environment.ran) == 12
    assert seen == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 8


async def test_a_replayed_group_is_the_sampled_one(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.5}).learner()
    buffer = Buffer(store=store, run="r", seed=1)
    one = await buffer.fill(rollouts_of(learner), 1, TASKS, "", 2)
    again = await Buffer(store=open_store(None, tmp_path), run="r", seed=1).fill(rollouts_of(learner), 1, TASKS, "", 2)
    said = [[[trace.turns[0].output for trace in group.traces] for group in groups] for groups in (one, again)]
    assert said[0] == said[1]
    assert [[t.score for t in g.traces] for g in one] == [[t.score for t in g.traces] for g in again]


async def test_after_the_engine_died_only_what_it_touched_is_sampled_again(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.5}).learner()
    engine = learner.engine
    assert isinstance(engine, FakeEngine)

    async def breaks(task: Task) -> None:
        if task == TASKS[2]:
            engine.broken = 10**6

    buffer = Buffer(store=store, run="r", seed=1)
    dying = rollouts_of(learner, FakeEnvironment(breaks), concurrency=1, engine_retries=0)
    with pytest.raises(EngineError):
        await buffer.fill(dying, 1, TASKS, "", 2)
    assert sorted(await buffer.complete(1)) == [0, 1]
    engine.broken = 0
    environment = FakeEnvironment()
    groups = await buffer.fill(rollouts_of(learner, environment), 1, TASKS, "", 2)
    assert sorted(environment.ran) == sorted([TASKS[2].id, TASKS[3].id] * 2)
    assert [len(group.traces) for group in groups] == [2] * 4


@pytest.mark.parametrize(("task", "num"), [(TASKS[1], 2), (TASKS[0], 3)])
async def test_a_plan_that_changed_under_a_running_turn_is_refused(tmp_path: Path, task: Task, num: int) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.5}).learner()
    buffer = Buffer(store=store, run="r", seed=1)
    await buffer.fill(rollouts_of(learner), 1, {0: TASKS[0]}, "", 2)
    with pytest.raises(Refused, match=r"step 1, slot 0 of r holds 2 attempts"):
        await buffer.fill(rollouts_of(learner), 1, {0: task}, "", num)


async def test_steps_do_not_share_groups(tmp_path: Path) -> None:
    store, learner = open_store(None, tmp_path), await FakeRuntime(tmp_path, {"refund": 0.5}).learner()
    buffer = Buffer(store=store, run="r", seed=1)
    found: list[list[Group]] = [await buffer.fill(rollouts_of(learner), step, TASKS, "", 2) for step in (1, 2)]
    assert not {t.id for g in found[0] for t in g.traces} & {t.id for g in found[1] for t in g.traces}
