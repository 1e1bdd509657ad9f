"""The command line: one file a noun, noun then verb; `--json` on all that lists.

Exit codes: 0 good, 1 failed, 2 wrong usage (a command, an option, a config or an id that does not exist).
"""

from __future__ import annotations

import sys

import typer

from honed import __version__
from honed.cli import demo, doctor, evaluate, ledger, run, serve, tasks, traces, train, up, versions, why
from honed.errors import HonedError, UserError

app = typer.Typer(
    name="honed",
    help="Keeps a deployed AI agent learning: serve, record, curate, practise, update, gate, release, watch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up")(up.up)
app.command("serve")(serve.serve)
app.command("run")(run.run)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("demo")(demo.demo)
app.add_typer(traces.app, name="traces")
app.add_typer(tasks.app, name="tasks")
app.add_typer(versions.app, name="versions")
app.command("ledger")(ledger.ledger)
app.command("why")(why.why)
app.command("doctor")(doctor.doctor)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"honed {__version__}")
        raise typer.Exit()


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    """Keeps a deployed AI agent learning."""


def main() -> None:
    """The console script: turns honed's own errors into one sentence and an exit code."""
    try:
        app()
    except UserError as error:
        typer.echo(f"honed: {error}", err=True)
        sys.exit(2)
    except HonedError as error:
        typer.echo(f"honed: {error}", err=True)
        sys.exit(1)
