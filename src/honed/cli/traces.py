"""`honed traces`: the conversations, of production, practice and evaluation alike."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from honed import types
from honed.cli import output
from honed.errors import UserError

app = typer.Typer(help="Conversations: production, rollouts, evaluations.", no_args_is_help=True)


@app.command("ls")
def ls(
    config: output.ConfigOption = output.DEFAULT_CONFIG,
    origin: Annotated[str | None, typer.Option(help="production, rollout, eval, demonstration or import.")] = None,
    signal: Annotated[str | None, typer.Option(help="Only traces with this signal.")] = None,
    line: output.LineOption = None,
    limit: output.LimitOption = 20,
    json: output.JsonOption = False,
) -> None:
    """Lists traces, newest first."""
    if origin is not None and origin not in get_args(types.Origin):
        raise UserError(f"no origin is called {origin!r}; use one of {', '.join(get_args(types.Origin))}.")
    found = output.store(config).traces.list(origin=origin, line=line, signal=signal, limit=limit)
    if json:
        output.show_json(found)
        return
    rows = [
        (t.id, t.origin, version_of(t), len(t.turns), score_of(t), ",".join(t.signals), output.when(t.at))
        for t in found
    ]
    output.show_table(("trace", "origin", "version", "turns", "score", "signals", "at"), rows, empty="No traces yet.")


@app.command("show")
def show(id: str, config: output.ConfigOption = output.DEFAULT_CONFIG, json: output.JsonOption = False) -> None:
    """Shows one trace, or the trace of a response id, as a conversation."""
    store = output.store(config)
    trace = store.traces.get(id if id.startswith("trace") else store.traces.turn(id).trace)
    if json:
        output.show_json(trace)
        return
    typer.echo(f"{trace.id}  {trace.origin}  {version_of(trace)}  {output.when(trace.at)}")
    for turn in trace.turns:
        for message in (*turn.added, turn.reply):
            for line in _lines(message):
                typer.echo(line)
        typer.echo(f"    {turn.id}  {len(turn.output)} tokens, {turn.finish}, {turn.fidelity}")
    for row in store.feedback.of([trace.id, *(turn.id for turn in trace.turns)]):
        typer.echo(
            f"  feedback {row.name} = {row.value if row.kind in ('metric', 'comment') else row.kind} ({row.source})"
        )
    if trace.score is not None:
        typer.echo(f"  score {trace.score.value:g} by {trace.score.verifier}: {trace.score.evidence}")
    if trace.fault is not None:
        typer.echo(f"  fault at {trace.fault.boundary}: {trace.fault.message}")


def version_of(trace: types.Trace) -> str:
    """The versions that answered, in order of appearance."""
    return ",".join(dict.fromkeys(span.version for turn in trace.turns for span in turn.versions))


def score_of(trace: types.Trace) -> str:
    """The verifier's score, or the fault's kind."""
    return trace.fault.kind if trace.fault else "" if trace.score is None else f"{trace.score.value:g}"


def _lines(message: types.Message) -> list[str]:
    text = [f"  {message.role}: {message.content}"] if message.content else []
    return text + [f"  {message.role} -> {call.name}({call.arguments})" for call in message.tool_calls]
