"""`honed traces`: the conversations, of production, practice and evaluation alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from honed import types
from honed.cli import output
from honed.errors import NotFound
from honed.store import Store

app = typer.Typer(help="Conversations: production, rollouts, evaluations.", no_args_is_help=True)


@app.command("ls")
def ls(
    config: output.ConfigOption = None,
    origin: Annotated[types.Origin | None, typer.Option(help="Only traces that came about so.")] = None,
    signal: Annotated[str | None, typer.Option(help="Only traces flagged with this signal, like bad_call.")] = None,
    line: output.LineOption = None,
    limit: output.LimitOption = 20,
    json: output.JsonOption = False,
) -> None:
    """Lists traces, newest first."""
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
def show(
    id: Annotated[str, typer.Argument(help="A trace's id, or the id of one of its responses.")],
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Shows one trace as a conversation, with its feedback and score."""
    store = output.store(config)
    trace = of_id(store, id)
    if json:
        output.show_json(trace)
        return
    typer.echo(f"{trace.id}  {trace.origin}  {version_of(trace)}  {output.when(trace.at)}")
    for turn in trace.turns:
        for message in (*turn.added, turn.reply):
            for line in _lines(message):
                typer.echo(line)
        length = output.num(len(turn.output), "token") if turn.fidelity == "tokens" else f"kept as {turn.fidelity}"
        typer.echo(f"    response {turn.id}: {length}, finish {turn.finish}")
    for line in told_feedback(store.feedback.of([trace.id, *(turn.id for turn in trace.turns)])):
        typer.echo(f"  {line}")
    if trace.score is not None:
        evidence = f": {trace.score.evidence}" if trace.score.evidence else ""
        typer.echo(f"  score {trace.score.value:g} by {trace.score.verifier}{evidence}")
    if trace.fault is not None:
        typer.echo(f"  fault at {trace.fault.boundary}: {trace.fault.message}")


def of_id(store: Store, id: str) -> types.Trace:
    """The trace with this id, or the one that holds the response with this id. Raises NotFound."""
    try:
        return store.traces.get(id)
    except NotFound:
        pass
    try:
        return store.traces.get(store.traces.turn(id).trace)
    except NotFound:
        raise NotFound(f"no trace and no response is called {id!r}; honed traces ls lists traces.") from None


def told_feedback(rows: Iterable[types.Feedback]) -> list[str]:
    """One line a statement; demonstrations and corrections by their kind alone, since they hold conversations."""
    return [
        f"feedback {row.name} = {row.value if row.kind in ('metric', 'comment') else row.kind} ({row.source})"
        for row in rows
    ]


def version_of(trace: types.Trace) -> str:
    """The versions that answered, in order of appearance."""
    return ",".join(dict.fromkeys(span.version for turn in trace.turns for span in turn.versions))


def score_of(trace: types.Trace) -> str:
    """The verifier's score, or the fault's kind."""
    return trace.fault.kind if trace.fault else "" if trace.score is None else f"{trace.score.value:g}"


def _lines(message: types.Message) -> list[str]:
    said = (message.content or "").replace("\n", "\n    ")
    text = [f"  {message.role}: {said}"] if said else []
    return text + [f"  {message.role} -> {call.name}({call.arguments})" for call in message.tool_calls]
