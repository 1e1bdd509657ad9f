"""What the support agent is taught first, and what it is judged by: functions that a config names."""

from __future__ import annotations

from honed.types import Message, Task
from support import env, world

NUM_DEMONSTRATIONS, NUM_BROKEN, NUM_EACH, NUM_EACH_BEFORE = 64, 16, 64, 32


def demonstrations() -> list[tuple[Task, tuple[Message, ...]]]:
    """64 requests of the first era with the conversations that serve them."""
    seeds = range(env.DEMONSTRATION_SEEDS, env.DEMONSTRATION_SEEDS + NUM_DEMONSTRATIONS)
    cases = [world.case(seed, "before") for seed in seeds]
    return [(env.task(found, "train"), world.gold(found)) for found in cases]


def demonstrations_after() -> list[tuple[Task, tuple[Message, ...]]]:
    """16 requests after the change, for the candidate that is broken on purpose."""
    seeds = range(env.DEMONSTRATION_SEEDS, env.DEMONSTRATION_SEEDS + NUM_BROKEN)
    cases = [world.case(seed, "after") for seed in seeds]
    return [(env.task(found, "train"), world.gold(found)) for found in cases]


def holdout_before() -> list[Task]:
    """32 held-out tasks of the kinds that will change and 32 of the others, before the change."""
    return env.suite("before", "holdout", env.HOLDOUT_SEEDS, NUM_EACH_BEFORE)


def holdout_after() -> list[Task]:
    """64 of each after the change of tools."""
    return env.suite("after", "holdout", env.HOLDOUT_SEEDS, NUM_EACH)
