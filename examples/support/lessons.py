"""What the support agent is taught first, and what it is judged by: functions that a config names."""

from __future__ import annotations

from honed.types import Message, Task
from support import env, world

NUM_DEMONSTRATIONS, NUM_EACH, NUM_DEV = 64, 64, 24


def demonstrations() -> list[tuple[Task, tuple[Message, ...]]]:
    """64 requests of the first era with the conversations that serve them."""
    seeds = range(env.DEMONSTRATION_SEEDS, env.DEMONSTRATION_SEEDS + NUM_DEMONSTRATIONS)
    cases = [world.case(seed, "before") for seed in seeds]
    return [(env.task(found, "train"), world.gold(found)) for found in cases]


def holdout_before() -> list[Task]:
    """64 held-out tasks of the kinds that will change and 64 of the others, before the change."""
    return env.suite("before", "holdout", env.HOLDOUT_SEEDS, NUM_EACH)


def holdout_after() -> list[Task]:
    """The same requests after the change of tools."""
    return env.suite("after", "holdout", env.HOLDOUT_SEEDS, NUM_EACH)


def dev_after() -> list[Task]:
    """Visible tasks of both sorts after the change, to see what each stage of learning adds."""
    return env.suite("after", "dev", env.DEV_SEEDS, NUM_DEV)
