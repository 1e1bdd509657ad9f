"""The support agent as an environment to practise in, and the tasks that are made of cases and of production traces."""

from __future__ import annotations

from typing import Any

import msgspec

from honed import codec
from honed.env.chat import converse
from honed.protocols import Outcome, Sandbox, Session
from honed.types import Split, Task, Trace
from support import world
from support.verify import VERIFIER

ENVIRONMENT = "support.env:SupportEnvironment"
TARGET, GUARD = "support-changed", "support-unchanged"
HOLDOUT_SEEDS, DEV_SEEDS, DEMONSTRATION_SEEDS = 5_000_000, 6_000_000, 7_000_000
"""Traffic never uses seeds from here on."""


class SupportEnvironment:
    """Plays the back end for one case: the model calls a tool, reads the result, answers."""

    async def run(self, task: Task, session: Session, sandbox: Sandbox | None) -> Outcome:
        """One attempt; the final state is the list of calls that the back end saw."""
        found = world.case(task.spec["seed"], task.spec["era"])
        calls: list[dict[str, Any]] = []

        async def execute(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
            calls.append({"name": name, "arguments": arguments})
            return world.execute(found, name, arguments)

        said = await converse(session, task.prompt, task.tools, execute, max_turns=world.MAX_TURNS)
        return Outcome(messages=tuple(said), state={"calls": calls})


def task(found: world.Case, split: Split, source: str = "") -> Task:
    """The task of a case; its suite is the changed kinds' or the others'."""
    made = Task(
        id="",
        prompt=world.prompt(found),
        tools=world.tools(found.era),
        environment=ENVIRONMENT,
        spec={"seed": found.seed, "era": found.era},
        verifier=VERIFIER,
        split=split,
        split_key=f"case-{found.seed}",
        kind=found.kind,
        suite=(TARGET if found.kind in world.CHANGED else GUARD) + ("" if found.era == "after" else "-before"),
        source=source or f"generator:{found.seed}",
    )
    return msgspec.structs.replace(made, id=codec.task_id(made))


def task_from_trace(trace: Trace) -> Task | None:
    """The task of a production conversation: its ticket number restores the back end as it was.

    None for conversations under tools that are gone: nobody will meet them again.
    """
    if not trace.tags.get("case", "").isdigit() or trace.tags.get("era") != "after":
        return None
    return task(world.case(int(trace.tags["case"]), "after"), "train", trace.id)


def suite(era: world.Era, split: Split, first_seed: int, num_each: int) -> list[Task]:
    """`num_each` tasks of the changed kinds and as many of the others, from a range of seeds of their own."""
    changed: list[Task] = []
    others: list[Task] = []
    seed = first_seed
    while min(len(changed), len(others)) < num_each:
        found = world.case(seed, era)
        chosen = changed if found.kind in world.CHANGED else others
        if len(chosen) < num_each:
            chosen.append(task(found, split))
        seed += 1
    return [*changed, *others]
