"""`honed versions`: a line's history, its verdicts, and the hand on the switch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from honed import types
from honed.assemble import merge_version, release_version, rollback_version
from honed.cli import output
from honed.errors import NotFound, UserError
from honed.store import Store

app = typer.Typer(help="Versions of a model line: list, show, release, roll back, merge.", no_args_is_help=True)


VersionArgument = Annotated[str, typer.Argument(help="line@number, or the number where the store holds one line.")]


@app.command("ls")
def ls(config: output.ConfigOption = None, line: output.LineOption = None, json: output.JsonOption = False) -> None:
    """Lists versions, oldest first, with the gate's verdict and which of them serves."""
    store = output.store(config)
    found = store.versions.list(line)
    if json:
        output.show_json([_row(store, version) for version in found])
        return
    rows = [
        (v.id, f"{v.line}@{v.parent or 0}", v.digest[:12], decision(store, v.id), serving(store, v), output.when(v.at))
        for v in found
    ]
    columns = ("version", "parent", "digest", "verdict", "serving", "made at")
    output.show_table(columns, rows, empty="No versions yet: the base model serves.")


@app.command("show")
def show(id: VersionArgument, config: output.ConfigOption = None, json: output.JsonOption = False) -> None:
    """Shows one version with its files, its recipe and every verdict on it."""
    store = output.store(config)
    version = find(store, id, output.settings(config).model.line)
    verdicts = store.verdicts.list(version=version.id)
    if json:
        output.show_json({"id": version.id, "version": version, "verdicts": verdicts})
        return
    if version.number == 0:
        typer.echo(f"{version.id} is the base model: it has no files here and no parent.")
        return
    typer.echo(f"{version.id}  {version.kind}  parent {version.line}@{version.parent or 0}  {output.when(version.at)}")
    for name in ("base", "uri", "digest", "optimiser", "recipe", "data"):
        typer.echo(f"  {name:10}{getattr(version, name) or 'none'}")
    for verdict in verdicts:
        show_verdict(verdict)


@app.command("release")
def release(
    id: VersionArgument,
    force: Annotated[bool, typer.Option("--force", help="Without the gate's promotion; say why.")] = False,
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "",
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Lets a version serve; without a gate's promotion only with --force and a reason."""
    if force and not reason:
        raise UserError("--force releases a version that no gate promoted: say why with --reason.")
    store = output.store(config)
    settings = output.settings(config)
    done = release_version(settings, store, find(store, id, settings.model.line), force=force, reason=reason)
    if json:
        output.show_json(done)
        return
    typer.echo(f"{done.version} serves {done.line} ({done.kind}), before it {done.previous or 'nothing'}")


@app.command("rollback")
def rollback(
    line: Annotated[str, typer.Argument(help="The model line, such as support.")],
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "by hand",
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Takes the serving version back to the one before it."""
    done = rollback_version(output.settings(config), output.store(config), line, reason=reason)
    if json:
        output.show_json(done)
        return
    typer.echo(f"{done.version} serves {done.line} again ({done.reason})")


@app.command("merge")
def merge(
    id: VersionArgument,
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Writes a version as a whole model in Hugging Face's layout: its adapter added into the base model."""
    store, settings = output.store(config), output.settings(config)
    version = find(store, id, settings.model.line)
    if version.kind == "full" or not version.uri:
        where = "the base model" if not version.uri else f"a whole model already, in {version.uri}"
        raise UserError(f"{version.id} is {where}: there is nothing to merge.")
    digest = merge_version(settings, version, folder)
    if json:
        output.show_json({"version": version.id, "folder": str(folder), "digest": digest})
        return
    typer.echo(f"{folder} holds {version.id} as a whole model; serve it anywhere, or set it as model.source.")


def _row(store: Store, version: types.Version) -> dict[str, Any]:
    known = {"id": version.id, "verdict": decision(store, version.id) or None, "serves": bool(serving(store, version))}
    return {**known, **msgspec.structs.asdict(version)}


def find(store: Store, id: str, line: str) -> types.Version:
    """The version called `line@number`, or a bare number where there is one line; `line` is the config's own.

    Raises NotFound, also for the base model of a line that neither the store nor the config knows.
    """
    lines = sorted({version.line for version in store.versions.list()} or {line})
    if "@" in id:
        found = store.versions.find(id)
        if found.number == 0 and found.line not in (line, *lines) and not store.traces.count(line=found.line):
            raise NotFound(f"there is no line {found.line!r}: the config's is {line!r} (lines: {', '.join(lines)}).")
        return found
    if not id.isdigit() or len(lines) != 1:
        raise UserError(f"{id!r} is no version id; write line@number (lines: {', '.join(lines)}).")
    return store.versions.find(f"{lines[0]}@{id}")


def decision(store: Store, version: str) -> str:
    """The newest verdict's decision on a version, or nothing."""
    verdicts = store.verdicts.list(version=version)
    return max(verdicts, key=lambda verdict: verdict.at).decision if verdicts else ""


def serving(store: Store, version: types.Version) -> str:
    """`serves` for the version that the line's newest release names."""
    current = store.releases.current(version.line)
    return "serves" if current is not None and current.version == version.id else ""


def show_verdict(verdict: types.Verdict) -> None:
    """Prints a verdict as sentences with its suites."""
    typer.echo(f"  verdict {verdict.decision} against {verdict.baseline}, {output.when(verdict.at)}")
    for suite in verdict.suites:
        typer.echo(
            f"    {suite.role} {suite.suite}: {output.percent(suite.baseline)} -> {output.percent(suite.candidate)}, "
            f"gain {100 * suite.gain:+.1f} points [{100 * suite.low:+.1f}, {100 * suite.high:+.1f}], "
            f"{suite.num_tasks} tasks"
        )
    for reason in verdict.reasons:
        typer.echo(f"    {reason}")
