"""`honed why ID`: explains a response (its version, what taught it) or a version (its failures, verdict and price)."""

from __future__ import annotations

import typer

from honed import types
from honed.cli import output, versions
from honed.cli.traces import version_of
from honed.errors import NotFound
from honed.store import Store

MAX_SHOWN = 5


def why(id: str, config: output.ConfigOption = output.DEFAULT_CONFIG, json: output.JsonOption = False) -> None:
    """Explains a response id, a trace id or a version id."""
    store = output.store(config)
    found = _version(store, id)
    if found is not None:
        _explain_version(store, found, json=json)
        return
    trace = store.traces.get(store.traces.turn(id).trace if not id.startswith("trace") else id)
    _explain_trace(store, trace, id, json=json)


def _version(store: Store, id: str) -> types.Version | None:
    if "@" not in id and not id.isdigit():
        return None
    return versions.find(store, id)


def _explain_trace(store: Store, trace: types.Trace, id: str, *, json: bool) -> None:
    names = list(dict.fromkeys(span.version for turn in trace.turns for span in turn.versions))
    if json:
        output.show_json({"id": id, "trace": trace.id, "versions": names, "signals": trace.signals})
        return
    typer.echo(
        f"{id} is {trace.origin}, answered by {version_of(trace) or 'an unknown version'}, {output.when(trace.at)}."
    )
    for row in store.feedback.of([trace.id, *(turn.id for turn in trace.turns)]):
        typer.echo(f"  feedback {row.name}: {row.value if row.kind in ('metric', 'comment') else row.kind}")
    if trace.signals:
        typer.echo(f"  flagged: {', '.join(trace.signals)}")
    for name in names:
        try:
            _explain_version(store, store.versions.find(name), json=False)
        except NotFound:
            typer.echo(f"  {name} is the base model, or a policy in the middle of practice.")


def _explain_version(store: Store, version: types.Version, *, json: bool) -> None:
    sources = store.versions.sources(version.id)
    verdicts = store.verdicts.list(version=version.id)
    spent = _dollars(store, version)
    if json:
        output.show_json({"version": version, "sources": sources, "verdicts": verdicts, "dollars": spent})
        return
    failures = list(dict.fromkeys(source for _, _, source in sources if source))
    typer.echo(f"{version.id}, parent {version.parent}, learned from {len(sources)} traces at {output.dollars(spent)}.")
    typer.echo(f"  taught by {len(failures)} production failures" + (":" if failures else "."))
    for source in failures[:MAX_SHOWN]:
        typer.echo(f"    {source}  {_request(store, source)}")
    if len(failures) > MAX_SHOWN:
        typer.echo(f"    and {len(failures) - MAX_SHOWN} more")
    for verdict in verdicts:
        versions.show_verdict(verdict)
    if not verdicts:
        typer.echo("  no gate has judged it.")


def _request(store: Store, trace_id: str) -> str:
    try:
        turns = store.traces.get(trace_id).turns
    except NotFound:
        return "(erased)"
    asked = [m.content for turn in turns for m in turn.added if m.role == "user" and m.content]
    return asked[-1] if asked else ""


def _dollars(store: Store, version: types.Version) -> float | None:
    entries = store.ledger.list(line=version.line, subject=version.id)
    priced = [entry.dollars for entry in entries if entry.dollars is not None]
    return sum(priced) if priced else None
