"""The order of lessons is a function of the plan, and configs that could only waste money are refused by name."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.algo.sft import Sft
from honed.errors import ConfigError
from honed.loop import lessons
from honed.loop.curate import CurateSettings
from honed.loop.lessons import LearnSettings, Phase, Plan
from honed.types import Version

PLAN = Plan(
    run="r",
    line="m",
    number=1,
    parent=Version(line="m", number=0),
    demonstrations=("a", "b", "c"),
    replay=("d", "e"),
    seed=4,
)


def phase(**fields: Any) -> Phase:
    return Phase(algorithm=Sft(), learning_rate=1.0, **{"batch_size": 2, "passes": 3, **fields})


def test_every_pass_sees_every_demonstration_once_in_an_order_of_its_own() -> None:
    plan = msgspec.structs.replace(PLAN, replay=())
    assert lessons.pass_length(plan, phase()) == 2
    passes = [lessons.sft_pass(plan, phase(), number, ()) for number in range(3)]
    assert [[len(batch) for batch in batches] for batches in passes] == [[2, 1]] * 3
    assert [sorted(chain(*batches)) for batches in passes] == [["a", "b", "c"]] * 3
    assert len({str(batches) for batches in passes}) > 1
    assert lessons.sft_pass(plan, phase(), 1, ()) == passes[1]


def test_what_is_spread_is_met_once() -> None:
    """Two conversations in three passes."""
    found = [lessons.spread(PLAN, phase(), number) for number in range(3)]
    assert sorted(chain(*found)) == ["d", "e"]
    assert max(map(len, found)) == 1
    assert found == [lessons.spread(PLAN, phase(), number) for number in range(3)]


@given(shown=st.integers(0, 30), again=st.integers(0, 30), size=st.integers(1, 12))
def test_every_step_has_its_part_of_both_and_no_more_than_a_batch(shown: int, again: int, size: int) -> None:
    replay = tuple(f"r{i}" for i in range(again))
    plan = msgspec.structs.replace(PLAN, demonstrations=tuple(f"d{i}" for i in range(shown)), replay=replay)
    one = phase(batch_size=size, passes=1)
    batches = lessons.sft_pass(plan, one, 0, lessons.spread(plan, one, 0))
    assert len(batches) == lessons.pass_length(plan, one)
    assert sorted(chain(*batches)) == sorted((*plan.demonstrations, *replay))
    for kind in "dr":
        parts = [sum(id[0] == kind for id in batch) for batch in batches]
        assert max(parts, default=0) - min(parts, default=0) <= 1
    assert all(len(batch) <= size for batch in batches)


def test_a_bounded_part_of_the_replay_is_asked_another_before_each_pass() -> None:
    plan = msgspec.structs.replace(PLAN, replay=tuple(f"r{i}" for i in range(20)))
    found = [lessons.candidates(plan, phase(candidates=12), number) for number in range(1, 3)]
    assert [len(set(ids)) for ids in found] == [12, 12]
    assert set(found[0]) != set(found[1])
    assert len(lessons.candidates(plan, phase(candidates=99), 1)) == 20
    # three passes replay 7 of the 20, so no fewer than 11 are asked
    assert len(lessons.candidates(plan, phase(candidates=1), 1)) == 11


def test_nothing_to_imitate_is_no_step() -> None:
    plan = msgspec.structs.replace(PLAN, demonstrations=(), replay=())
    assert lessons.pass_length(plan, phase()) == 0


@given(num=st.integers(1, 30), size=st.integers(1, 12), draws=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_every_task_comes_equally_often_and_none_twice_in_a_draw(num: int, size: int, draws: int, seed: int) -> None:
    tasks = [f"t{i}" for i in range(num)]
    drawn = [lessons.draw(tasks, size, seed, 2, number) for number in range(draws)]
    assert all(len(set(draw)) == len(draw) == min(size, num) for draw in drawn)
    counts = dict.fromkeys(tasks, 0)
    for each in drawn:
        for id in each:
            counts[id] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
    assert drawn == [lessons.draw(tasks, size, seed, 2, number) for number in range(draws)]


def test_draws_are_shuffled_anew() -> None:
    tasks = [f"t{i}" for i in range(7)]
    rows = [[id for n in range(7) for id in lessons.draw(tasks, 3, seed, 2, n)] for seed in (1, 2)]
    assert rows[0] != rows[1]
    assert rows[0][:7] != rows[0][7:14]


def test_the_learning_rate_rises_over_the_warm_up() -> None:
    assert [lessons.learning_rate(8.0, step, 3) for step in range(5)] == [2.0, 4.0, 6.0, 8.0, 8.0]
    assert lessons.learning_rate(8.0, 0, 0) == 8.0


def test_the_learning_rate_falls_over_the_last_share() -> None:
    """Of 10 steps the last 3 fall by quarters."""
    rates = [lessons.learning_rate(8.0, step, 1, 10, 0.3) for step in range(10)]
    assert rates == [4.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 6.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("learn", "curate", "batch", "keys"),
    [
        ({"group_size": 1}, {}, 8, ["learn.group_size", "learn.steps"]),
        ({"groups_per_step": 9}, {"max_tasks": 8}, 8, ["learn.groups_per_step", "curate.max_tasks"]),
        (
            {},
            {"max_demonstrations": 3, "replay": 4},
            8,
            ["sft.batch_size", "max_demonstrations", "replay"],
        ),
        ({"steps": 0, "imitate": False}, {}, 8, ["learn.steps", "learn.imitate"]),
        ({}, {"probe_attempts": 1}, 8, ["curate.probe_attempts"]),
        ({}, {"holdout_per_kind": 4, "holdout_share": 0.0}, 8, ["curate.holdout_per_kind", "curate.holdout_share"]),
    ],
)
def test_a_config_that_could_only_waste_money_is_refused_by_its_keys(
    learn: dict[str, object], curate: dict[str, object], batch: int, keys: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        lessons.check(LearnSettings(**learn), CurateSettings(**curate), batch)  # type: ignore[arg-type]
    assert all(key in str(caught.value) for key in keys)


def test_the_defaults_are_accepted() -> None:
    lessons.check(LearnSettings(), CurateSettings(), 8)
    lessons.check(LearnSettings(steps=0, group_size=1), CurateSettings(), 8)
