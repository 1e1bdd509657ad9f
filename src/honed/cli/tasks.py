"""`honed tasks`: what can be practised, and what was set aside and why."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from honed import types
from honed.cli import output
from honed.store import Store
from honed.store.tasks import State

app = typer.Typer(help="Tasks that a program can check: practised, set aside or held out.", no_args_is_help=True)
SEALED = "holdout"


class Listed(types.Noun, frozen=True, kw_only=True):
    """A task with its standing, and why it has it."""

    task: types.Task
    state: str
    reason: str


class Sealed(types.Noun, frozen=True, kw_only=True):
    """How many held-out tasks of a suite and kind have a standing."""

    suite: str
    kind: str
    state: str
    num_tasks: int


@app.command("ls")
def ls(
    config: output.ConfigOption = None,
    split: Annotated[types.Split | None, typer.Option(help="Only this split.")] = None,
    suite: Annotated[str | None, typer.Option(help="Only this suite.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only this kind of request.")] = None,
    state: Annotated[State | None, typer.Option(help="Only tasks of this standing.")] = None,
    limit: output.LimitOption = 50,
    json: output.JsonOption = False,
) -> None:
    """Lists tasks, newest first, with their standing; sealed holdout tasks are counted, not shown."""
    store = output.store(config)
    tasks = [task for task in store.tasks.list(split, suite, kind, state) if task.split != SEALED]
    newest = tasks[::-1][:limit]
    found = [Listed(task=t, state=store.tasks.state(t.id), reason=store.tasks.reason(t.id)) for t in newest]
    sealed = _sealed(store, suite, kind, state) if split in (None, SEALED) else []
    if json:
        output.show_json({"tasks": found, "sealed": sealed})
        return
    if found or not sealed:
        columns = ("task", "split", "suite", "kind", "state", "reason", "source", "prompt")
        output.show_table(columns, [_row(listed) for listed in found], empty="There are no such tasks.")
    if len(found) < len(tasks):
        typer.echo(f"{len(tasks) - len(found)} older ones are not shown; --limit shows more.")
    for group in sealed:
        what = " ".join(filter(None, (group.state, group.kind, "task")))
        suite = f" of the suite {group.suite}" if group.suite else ""
        typer.echo(f"sealed for the gate: {output.num(group.num_tasks, what)}{suite}")


@app.command("show")
def show(
    id: Annotated[str, typer.Argument(help="A task's id, as honed tasks ls prints it.")],
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Shows one task, its standing, its verifier and how attempts at it ended."""
    store = output.store(config)
    task, state, reason = store.tasks.get(id), store.tasks.state(id), store.tasks.reason(id)
    attempts = store.traces.list(task=id, limit=1000)
    if json:
        output.show_json({"task": task, "state": state, "reason": reason, "attempts": [a.id for a in attempts]})
        return
    typer.echo(f"{task.id}  {task.split}  {task.suite}  {task.kind}  {state}" + (f": {reason}" if reason else ""))
    typer.echo(f"  environment {task.environment}, verifier {task.verifier}, source {task.source or 'none'}")
    for message in task.prompt:
        typer.echo(f"  {message.role}: {message.content}")
    passed = sum(1 for a in attempts if a.score is not None and a.score.value >= 1)
    faults = output.num(sum(a.fault is not None for a in attempts), "fault")
    typer.echo(f"  {output.num(len(attempts), 'attempt')}, {passed} passed, {faults}")


def _row(listed: Listed) -> tuple[str, ...]:
    task = listed.task
    prompt = output.one_line(task.prompt[-1].content if task.prompt else "")
    return (task.id, task.split, task.suite, task.kind, listed.state, listed.reason, task.source, prompt)


def _sealed(store: Store, suite: str | None, kind: str | None, state: str | None) -> list[Sealed]:
    counts: dict[tuple[str, str, str], int] = {}
    for standing in get_args(State) if state is None else (state,):
        for task in store.tasks.list(SEALED, suite, kind, standing):
            key = (task.suite, task.kind, standing)
            counts[key] = counts.get(key, 0) + 1
    return [Sealed(suite=a, kind=b, state=c, num_tasks=count) for (a, b, c), count in sorted(counts.items())]
