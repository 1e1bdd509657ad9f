"""`honed why ID`: explains a response (its version, what taught it) or a version (its failures, verdict and price)."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

from honed import types
from honed.cli import output, versions
from honed.cli.traces import of_id, told_feedback
from honed.economics.report import total_dollars
from honed.errors import NotFound
from honed.store import Store

MAX_SHOWN = 5


class Teaching(types.Noun, frozen=True, kw_only=True):
    """One trace that a version learned from, the task it attempted, and the production failure behind the task."""

    trace: str
    task: str | None
    failure: str | None


class Origin(types.Noun, frozen=True, kw_only=True):
    """Where an answering version comes from. Only a `what` of "version" has learned from anything.

    `dollars` is the sum of what has a price; `unpriced` counts the other ledger entries by what they were spent on.
    """

    id: str
    what: Literal["version", "base model", "practice"]
    version: types.Version | None = None
    sources: tuple[Teaching, ...] = ()
    failures: tuple[str, ...] = ()
    verdicts: tuple[types.Verdict, ...] = ()
    dollars: float | None = None
    num_entries: int = 0
    unpriced: dict[str, int] = {}


class Explained(types.Noun, frozen=True, kw_only=True):
    """A response or a trace, with the origin of every version that answered in it."""

    id: str
    trace: str
    origin: types.Origin
    versions: tuple[Origin, ...]
    signals: tuple[str, ...]
    feedback: tuple[types.Feedback, ...]


def why(
    id: Annotated[str, typer.Argument(help="A response's id, a trace's, or line@number.")],
    config: output.ConfigOption = None,
    json: output.JsonOption = False,
) -> None:
    """Explains a response or a trace (which version answered, and what taught it), or a version."""
    store = output.store(config)
    if "@" in id or id.isdigit():
        found = origin_of(store, versions.find(store, id, output.settings(config).model.line).id)
        if json:
            output.show_json(found)
        else:
            _show_origin(store, found)
        return
    trace = of_id(store, id)
    explained = explain(store, id, trace)
    if json:
        output.show_json(explained)
        return
    answered = ", ".join(found.id for found in explained.versions) or "a version that was not recorded"
    typer.echo(f"{id} is of {trace.origin}, answered by {answered}, {output.when(trace.at)}.")
    for line in told_feedback(explained.feedback):
        typer.echo(f"  {line}")
    if trace.signals:
        typer.echo(f"  flagged: {', '.join(trace.signals)}")
    for found in explained.versions:
        _show_origin(store, found)


def explain(store: Store, id: str, trace: types.Trace) -> Explained:
    """What the store knows of a trace; for a response's id only of that response's own versions."""
    turns = [turn for turn in trace.turns if id in (turn.id, trace.id)]
    names = dict.fromkeys(span.version for turn in turns for span in turn.versions)
    return Explained(
        id=id,
        trace=trace.id,
        origin=trace.origin,
        versions=tuple(origin_of(store, name) for name in names),
        signals=trace.signals,
        feedback=tuple(store.feedback.of([trace.id, *(turn.id for turn in trace.turns)])),
    )


def origin_of(store: Store, id: str) -> Origin:
    """Where the version called `id` comes from. Raises NotFound for a number that the store does not hold."""
    if id.endswith("@0"):
        return Origin(id=id, what="base model", version=store.versions.find(id))
    if re.search(r"@\d+\.\d+$", id):
        return Origin(id=id, what="practice")
    version = store.versions.find(id)
    sources = tuple(Teaching(trace=a, task=b, failure=c) for a, b, c in store.versions.sources(id))
    entries = store.ledger.list(line=version.line, subject=id)
    dollars, _ = total_dollars(entries)
    unpriced = _unpriced(entries)
    return Origin(
        id=id,
        what="version",
        version=version,
        sources=sources,
        failures=tuple(dict.fromkeys(source.failure for source in sources if source.failure)),
        verdicts=tuple(store.verdicts.list(version=id)),
        dollars=dollars if any(entry.dollars is not None for entry in entries) else None,
        num_entries=len(entries),
        unpriced=unpriced,
    )


def _unpriced(entries: list[types.Entry]) -> dict[str, int]:
    """How many entries have no price, by activity and device; one that was taken back does not count."""
    groups: dict[str, list[types.Entry]] = {}
    for entry in entries:
        groups.setdefault(f"{entry.activity} on {entry.device}", []).append(entry)
    counts = {name: total_dollars(group)[1] for name, group in sorted(groups.items())}
    return {name: count for name, count in counts.items() if count > 0}


def _show_origin(store: Store, found: Origin) -> None:
    if found.what == "base model":
        typer.echo(f"{found.id} is the base model: honed has taught it nothing.")
        return
    if found.what == "practice":
        parent, _, updates = found.id.rpartition(".")
        typer.echo(f"{found.id} is a policy in the middle of practice: {updates} updates after {parent}.")
        return
    assert found.version is not None
    parent = f"{found.version.line}@{found.version.parent or 0}"
    typer.echo(f"{found.id}, parent {parent}, learned from {output.num(len(found.sources), 'trace')}.")
    typer.echo(f"  {_price(found)}")
    failures = output.num(len(found.failures), "production failure")
    typer.echo(f"  taught by {failures}" + (":" if found.failures else "."))
    for failure in found.failures[:MAX_SHOWN]:
        typer.echo(f"    {failure}  {_request(store, failure)}")
    if len(found.failures) > MAX_SHOWN:
        typer.echo(f"    and {len(found.failures) - MAX_SHOWN} more; --json lists all")
    for verdict in found.verdicts:
        versions.show_verdict(verdict)
    if not found.verdicts:
        typer.echo("  no gate has judged it.")


def _price(found: Origin) -> str:
    if not found.num_entries:
        return "the ledger has nothing that was spent on it."
    missing = ", ".join(f"{name} ({output.num(count, 'entry', 'entries')})" for name, count in found.unpriced.items())
    if found.dollars is None:
        return f"what was spent on it has no price: {missing}."
    return f"{output.dollars(found.dollars)} spent" + (f", and what has no price: {missing}." if missing else ".")


def _request(store: Store, trace_id: str) -> str:
    try:
        turns = store.traces.get(trace_id).turns
    except NotFound:
        return "(erased)"
    asked = [m.content for turn in turns for m in turn.added if m.role == "user" and m.content]
    return output.one_line(asked[-1]) if asked else ""
