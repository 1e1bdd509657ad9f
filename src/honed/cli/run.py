"""`honed run`: the loop."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from honed.assemble import build_loop
from honed.cli import output
from honed.cli.progress import watch
from honed.loop.run import abandon as abandon_turn
from honed.loop.run import run_forever, run_once
from honed.loop.turn import Loop, TurnReport


def run(
    config: output.ConfigArgument = None,
    once: Annotated[bool, typer.Option("--once", help="One turn, then stop.")] = False,
    abandon: Annotated[bool, typer.Option("--abandon", help="Forget a turn that was cut off, and stop.")] = False,
    json: output.JsonOption = False,
) -> None:
    """Captures failures, makes tasks of them, learns, gates and releases, again and again.

    With --once the exit code is 1 when the turn's candidate was not promoted.
    """
    with watch() as on_event:
        loop = build_loop(output.settings(config), on_event=on_event)
        if abandon:
            done = asyncio.run(abandon_turn(loop, reason="by hand"))
            typer.echo("the turn was abandoned" if done else "there is no turn to abandon")
            return
        if not once:
            asyncio.run(_forever(loop, json=json))
            return
        report = asyncio.run(run_once(loop))
    show_report(report, json=json)
    raise typer.Exit(0 if report.ended in ("promoted", "idle") else 1)


async def _forever(loop: Loop, *, json: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_forever(loop, stop=stop, on_report=lambda report: show_report(report, json=json))


def show_report(report: TurnReport, *, json: bool) -> None:
    """Says what a turn did, in sentences or as JSON."""
    if json:
        output.show_json(report)
        return
    if report.ended == "idle":
        typer.echo(f"nothing to do for {report.line}: {report.num_failures} new failures are too few for a turn.")
        return
    signals = ", ".join(f"{count} {name}" for name, count in sorted(report.signals.items()))
    typer.echo(f"{report.version or report.line}: {report.ended} after {report.seconds:.0f} s")
    typer.echo(f"  {report.num_failures} failures ({signals or 'given by hand'})")
    typer.echo(
        f"  {report.num_demonstrations} demonstrations, {report.num_practised} of {report.num_tasks} tasks practised"
    )
    if report.rewards:
        typer.echo("  reward by step: " + ", ".join(f"{100 * reward:.0f} %" for reward in report.rewards))
    for reason in report.reasons:
        typer.echo(f"  {reason}")
