"""`honed train`: learns from demonstrations or tasks that a person gives, instead of from traffic."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from honed.assemble import build_loop, given_lessons
from honed.cli import output
from honed.cli.progress import watch
from honed.cli.run import show_report
from honed.loop.run import run_once


def train(
    lessons: Annotated[str, typer.Argument(help="module:function that returns tasks with their demonstrations.")],
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Trains one version from given lessons, judges it at the gate and, when it is better, releases it."""
    settings = output.settings(config)
    with watch() as on_event:
        loop = build_loop(settings, on_event=on_event)
        report = asyncio.run(run_once(loop, given_lessons(settings, loop, lessons)))
    show_report(report, json=json)
    raise typer.Exit(0 if report.ended == "promoted" else 1)
