"""What the support agent is taught first, and what it is judged by: functions that a config names."""

from __future__ import annotations

import itertools
from collections import Counter

from honed.types import Message, Task
from support import env, world

NUM_DEMONSTRATIONS, NUM_BROKEN, NUM_EACH, NUM_EACH_BEFORE, NUM_DEV = 64, 16, 64, 16, 24


def demonstrations() -> list[tuple[Task, tuple[Message, ...]]]:
    """64 requests of the first era with the conversations that serve them, as many of each kind as of any other."""
    cases = _balanced("before", NUM_DEMONSTRATIONS)
    return [(env.task(found, "train"), world.gold(found)) for found in cases]


def demonstrations_after() -> list[tuple[Task, tuple[Message, ...]]]:
    """16 requests after the change, for the candidate that is broken on purpose."""
    seeds = range(env.DEMONSTRATION_SEEDS, env.DEMONSTRATION_SEEDS + NUM_BROKEN)
    cases = [world.case(seed, "after") for seed in seeds]
    return [(env.task(found, "train"), world.gold(found)) for found in cases]


def holdout_before() -> list[Task]:
    """16 held-out tasks of the kinds that will change and 16 of the others, before the change."""
    return env.suite("before", "holdout", env.HOLDOUT_SEEDS, NUM_EACH_BEFORE)


def holdout_after() -> list[Task]:
    """64 of each after the change of tools."""
    return env.suite("after", "holdout", env.HOLDOUT_SEEDS, NUM_EACH)


def dev_after() -> list[Task]:
    """24 more of the changed kinds, to see between the phases of learning what each one added."""
    tasks = env.suite("after", "dev", env.DEV_SEEDS, NUM_DEV)
    return [task for task in tasks if task.suite == env.TARGET]


def _balanced(era: world.Era, num: int) -> list[world.Case]:
    """The first cases of the lessons' seeds, of no kind more than its share: a random 64 held 5 of one kind and 15 of
    another, and the rare kind was then served worst."""
    most = -(-num // len(world.KINDS))
    taken: Counter[str] = Counter()
    cases: list[world.Case] = []
    for seed in itertools.count(env.DEMONSTRATION_SEEDS):
        found = world.case(seed, era)
        if taken[found.kind] < most:
            taken[found.kind] += 1
            cases.append(found)
        if len(cases) == num:
            break
    return cases
