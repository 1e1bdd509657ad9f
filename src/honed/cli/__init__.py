"""The command line: one file a noun, noun then verb; `--json` on all that lists.

Exit codes: 0 good, 1 failed, 2 wrong usage (a command, an option, a config or an id that does not exist).
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from honed import __version__
from honed.cli import demo, doctor, evaluate, ledger, run, serve, tasks, traces, train, up, versions, why
from honed.errors import HonedError, UserError


class _OneSentence(TyperGroup):
    """Turns honed's own errors, of whichever command, into one sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that was asked for."""
        try:
            return super().invoke(ctx)
        except HonedError as error:
            typer.echo(f"honed: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, UserError) else 1) from None


app = typer.Typer(
    name="honed",
    cls=_OneSentence,
    help="Keeps a deployed AI agent learning: serve, record, curate, practise, update, gate, release, watch.\n\n"
    "Exit codes: 0 good, 1 failed, 2 wrong usage (an option, a config or an id that does not exist).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up", short_help="Serve and learn, under one supervisor.")(up.up)
app.command("serve", short_help="Serve the released version over HTTP.")(serve.serve)
app.command("run", short_help="Learn from what failed, again and again.")(run.run)
app.command("train", short_help="Learn from lessons that you give.")(train.train)
app.command("eval", short_help="Measure how often a version succeeds.")(evaluate.evaluate)
app.command("demo", short_help="Show the whole road on a small real model.")(demo.demo)
app.add_typer(traces.app, name="traces", short_help="Look at recorded conversations.")
app.add_typer(tasks.app, name="tasks", short_help="Look at what can be practised.")
app.add_typer(versions.app, name="versions", short_help="List, explain, release, roll back.")
app.command("ledger", short_help="Where the money went, what it bought.")(ledger.ledger)
app.command("why", short_help="What answered, and what taught it.")(why.why)
app.command("doctor", short_help="Check this machine and the store.")(doctor.doctor)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"honed {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print honed's version."),
) -> None:
    pass


def main() -> None:
    """The console script."""
    app(prog_name="honed")
