"""The order of lessons is a function of the plan, and configs that could only waste money are refused by name."""

from __future__ import annotations

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


def test_every_pass_sees_every_demonstration_once_in_an_order_of_its_own() -> None:
    phase = Phase(algorithm=Sft(), learning_rate=1.0, batch_size=2, passes=3)
    batches = lessons.sft_batches(msgspec.structs.replace(PLAN, replay=()), phase)
    assert [len(batch) for batch in batches] == [2, 1] * 3
    passes = [batches[2 * n] + batches[2 * n + 1] for n in range(3)]
    assert [sorted(ids) for ids in passes] == [["a", "b", "c"]] * 3
    assert len({tuple(ids) for ids in passes}) > 1


def test_what_is_replayed_is_spread_over_the_passes() -> None:
    """Two conversations in three passes: each is met once."""
    phase = Phase(algorithm=Sft(), learning_rate=1.0, batch_size=2, passes=3)
    batches = lessons.sft_batches(PLAN, phase)
    assert sorted(id for batch in batches for id in batch) == sorted("abc" * 3 + "de")
    assert sum(len(batch) for batch in batches[:2]) == 3
    assert lessons.sft_batches(PLAN, phase) == batches


def test_nothing_to_imitate_is_no_step() -> None:
    phase = Phase(algorithm=Sft(), learning_rate=1.0, passes=3)
    assert lessons.sft_batches(msgspec.structs.replace(PLAN, demonstrations=(), replay=()), phase) == []


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
