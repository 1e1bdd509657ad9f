"""`honed eval`: how often a version passes a set of tasks, with an interval and what it cost."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from honed import types
from honed.assemble import evaluate_version
from honed.cli import output, versions
from honed.cli.progress import watch
from honed.errors import NotFound, UserError


def evaluate(
    version: Annotated[str, typer.Argument(help="line@number; number 0 is the base model.")],
    suite: Annotated[str | None, typer.Option(help="Only this suite; default: all.")] = None,
    split: Annotated[types.Split, typer.Option(help="The tasks of this split.")] = "dev",
    attempts: Annotated[int, typer.Option(min=1, help="Attempts at each task.")] = 1,
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Attempts tasks of the store with a version: success with a 95 % interval, faults and dollars."""
    settings, store = output.settings(config), output.store(config)
    asked = versions.find(store, version, settings.model.line)
    if asked.line != settings.model.line:
        raise UserError(f"{asked.id} is not of the config's line, {settings.model.line!r}: name its own config.")
    if not store.tasks.list(split, suite, state="ready"):
        known = sorted({task.suite for task in store.tasks.list(split, state="ready")})
        there = f"suites that have some: {', '.join(known)}" if known else f"there are none in the split {split}"
        raise NotFound(f"no ready {split} tasks{f' of the suite {suite!r}' if suite else ''} to attempt; {there}.")
    with watch() as on_event:
        work = evaluate_version(settings, store, asked, suite=suite, split=split, attempts=attempts, on_event=on_event)
        found = asyncio.run(work)
    if json:
        output.show_json(found)
        return
    rows = [
        (
            r.suite,
            r.num_tasks,
            output.percent(r.success),
            f"[{output.percent(r.low)}, {output.percent(r.high)}]",
            r.faults,
            output.dollars(r.dollars),
        )
        for r in found
    ]
    output.show_table(
        ("suite", "tasks", "success", "95 % interval", "faults", "cost"), rows, empty="There are no such tasks."
    )
