"""`honed eval`: how often a version passes a set of tasks, with an interval and what it cost."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from honed.assemble import evaluate_version
from honed.cli import output, versions
from honed.cli.progress import watch


def evaluate(
    version: Annotated[str, typer.Argument(help="line@number; number 0 is the base model.")],
    suite: Annotated[str | None, typer.Option(help="Only this suite.")] = None,
    split: Annotated[str, typer.Option(help="train, dev or holdout.")] = "dev",
    attempts: Annotated[int, typer.Option(min=1, help="Attempts at each task.")] = 1,
    config: output.ConfigOption = output.DEFAULT_CONFIG,
    json: output.JsonOption = False,
) -> None:
    """Evaluates a version on tasks of the store: success with a 95 % interval, tokens and dollars."""
    settings, store = output.settings(config), output.store(config)
    with watch() as on_event:
        found = asyncio.run(
            evaluate_version(
                settings,
                store,
                versions.find(store, version),
                suite=suite,
                split=split,
                attempts=attempts,
                on_event=on_event,
            )
        )
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
