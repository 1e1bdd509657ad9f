"""`honed tasks`: what can be practised, and what was set aside and why."""

from __future__ import annotations

from typing import Annotated

import typer

from honed.cli import output

app = typer.Typer(help="Tasks that a program can check.", no_args_is_help=True)


@app.command("ls")
def ls(
    config: output.ConfigOption = output.DEFAULT_CONFIG,
    split: Annotated[str | None, typer.Option(help="train, dev or holdout.")] = None,
    suite: Annotated[str | None, typer.Option(help="Only this suite.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only this kind of request.")] = None,
    state: Annotated[str | None, typer.Option(help="ready, waiting, always, never, retired or quarantined.")] = None,
    limit: output.LimitOption = 50,
    json: output.JsonOption = False,
) -> None:
    """Lists tasks with their state; sealed holdout tasks are counted, not shown."""
    store = output.store(config)
    found = store.tasks.list(split=split, suite=suite, kind=kind, state=state)[:limit]
    if json:
        output.show_json(found)
        return
    rows = [
        (t.id, t.split, t.suite, t.kind, store.tasks.state(t.id), t.source, _prompt(t.prompt[-1].content))
        for t in found
    ]
    output.show_table(("task", "split", "suite", "kind", "state", "source", "prompt"), rows, empty="No tasks yet.")


@app.command("show")
def show(id: str, config: output.ConfigOption = output.DEFAULT_CONFIG, json: output.JsonOption = False) -> None:
    """Shows one task, its verifier and its attempts."""
    store = output.store(config)
    task = store.tasks.get(id)
    attempts = store.traces.list(task=id, limit=1000)
    if json:
        output.show_json({"task": task, "state": store.tasks.state(id), "attempts": [a.id for a in attempts]})
        return
    typer.echo(f"{task.id}  {task.split}  {task.suite}  {task.kind}  {store.tasks.state(id)}")
    typer.echo(f"  environment {task.environment}, verifier {task.verifier}, source {task.source or 'none'}")
    for message in task.prompt:
        typer.echo(f"  {message.role}: {message.content}")
    passed = sum(1 for a in attempts if a.score is not None and a.score.value >= 1)
    typer.echo(f"  {len(attempts)} attempts, {passed} passed, {sum(a.fault is not None for a in attempts)} faults")


def _prompt(text: str | None) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= 70 else line[:69] + "…"
