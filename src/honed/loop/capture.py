"""The first arrow: which conversations look wrong, by small pure functions Trace -> str | None.

A signal is a hint for curation and never a judgement: what is practised is decided by verifiers. `flag` runs the
signals over a line's production traces and writes their names to the store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from honed import plugins
from honed.config import Settings
from honed.errors import NotFound
from honed.log import log
from honed.loop import paths
from honed.protocols import Signal
from honed.store import Store
from honed.text.tools import FORMATS
from honed.types import Feedback, ToolCall, Trace, Turn

NEGATIVE = "negative_feedback"
OPENINGS = frozenset(format.opening for format in FORMATS.values())
OVERLAP_SECONDS = 60.0
"""Traces this much older than the last look are looked at again: they may have grown, or been drained late."""


class CaptureSettings(Settings):
    """[capture]: what counts as a sign of failure, and how many make a turn of the loop worth its price."""

    metric: str = "success"
    """Name of the feedback metric that says how it went."""
    threshold: float = 0.5
    """A metric below this is negative."""
    signals: tuple[str, ...] = ("bad_call", "tool_error", "recovered_error", "empty", "truncated", "repeated")
    """Signals besides negative feedback: built-in names or module:attribute."""
    failures: tuple[str, ...] = (NEGATIVE, "bad_call", "tool_error", "empty", "truncated", "repeated")
    """Signals that make a conversation a failure to learn from; others are only noted."""
    min_failures: int = 8
    """A turn of the loop starts when at least this many conversations failed since the last one."""
    max_traces: int = 10_000
    """At most this many conversations are looked at in one turn, newest first."""


# ------------------------------------------------------------------------------------------------ the signals


def bad_call(trace: Trace) -> str | None:
    """A tool call that names no offered tool, whose arguments are no JSON object, that its schema refuses, or that
    could not be read: then the whole reply stayed text, the call's opening in it."""
    schemas = {tool.name: tool.parameters for tool in trace.tools}
    path = paths.last_path(trace)
    calls = [call for turn in path for call in turn.reply.tool_calls]
    is_bad = any(unread(turn) for turn in path) or any(not fits(call, schemas) for call in calls)
    return "bad_call" if is_bad else None


def tool_error(trace: Trace) -> str | None:
    """The last word of a tool was an error, and nothing mended it."""
    return "tool_error" if _tool_failures(trace)[-1:] == [True] else None


def recovered_error(trace: Trace) -> str | None:
    """A tool reported an error, and a later call went well."""
    failures = _tool_failures(trace)
    return "recovered_error" if any(failures) and not failures[-1] else None


def empty(trace: Trace) -> str | None:
    """The newest reply says nothing and calls nothing, though nobody cut it off."""
    path = paths.last_path(trace)
    if not path or path[-1].fidelity == "redacted" or path[-1].is_cut:
        return None
    reply = path[-1].reply
    return "empty" if not reply.tool_calls and not (reply.content or "").strip() else None


def truncated(trace: Trace) -> str | None:
    """A reply ran into its length limit."""
    return "truncated" if any(turn.finish == "length" for turn in paths.last_path(trace)) else None


def repeated(trace: Trace) -> str | None:
    """The same reply (text and calls) was given twice in a row."""
    said = [_said(turn.reply.content, turn.reply.tool_calls) for turn in paths.last_path(trace)]
    twice = any(one == other and one != ("", ()) for one, other in itertools.pairwise(said))
    return "repeated" if twice else None


BUILT_IN: dict[str, Signal] = {
    "bad_call": bad_call,
    "tool_error": tool_error,
    "recovered_error": recovered_error,
    "empty": empty,
    "truncated": truncated,
    "repeated": repeated,
}


def negative(feedback: Iterable[Feedback], settings: CaptureSettings) -> Signal:
    """A signal that knows what people said: the newest value of the metric is below the threshold, or somebody
    corrected the answer."""
    rows: dict[str, list[Feedback]] = {}
    for row in feedback:
        rows.setdefault(row.target, []).append(row)

    def negative_feedback(trace: Trace) -> str | None:
        found = [row for target in (trace.id, *(turn.id for turn in trace.turns)) for row in rows.get(target, ())]
        metrics = [row for row in found if row.kind == "metric" and row.name == settings.metric]
        if any(row.kind == "correction" for row in found):
            return NEGATIVE
        newest = max(metrics, key=lambda row: (row.at, row.id), default=None)
        return NEGATIVE if newest is not None and float(newest.value) < settings.threshold else None

    return negative_feedback


def signals_of(trace: Trace, signals: Sequence[Signal]) -> tuple[str, ...]:
    """The names that the signals give, each once, in their order. A signal that raises is reported and says nothing."""
    names: list[str] = []
    for signal in signals:
        try:
            name = signal(trace)
        except Exception as error:  # the boundary: somebody else's signal must not stop the loop
            log(
                "capture.signal_raised",
                signal=getattr(signal, "__name__", str(signal)),
                trace=trace.id,
                error=repr(error),
            )
            continue
        if name is not None and name not in names:
            names.append(name)
    return tuple(names)


# --------------------------------------------------------------------------------------------------- the arrow


def flag(
    store: Store, line: str, since: float, settings: CaptureSettings | None = None, *, looked: float = 0.0
) -> list[Trace]:
    """Runs the signals over the line's production traces since then and writes their names to the store.

    Returns the failures, oldest first: the traces with at least one of `settings.failures`. `looked` is when this was
    last done under the same settings: only newer traces, and those that newer feedback is about, are looked at again.
    """
    settings = settings or CaptureSettings()
    traces = _unseen(store, line, since, looked - OVERLAP_SECONDS, settings.max_traces)
    targets = [id for trace in traces for id in (trace.id, *(turn.id for turn in trace.turns))]
    signals = [negative(store.feedback.of(targets), settings), *resolve(settings.signals)]
    counts = Counter[str]()
    for trace in traces:
        names = signals_of(trace, signals)
        counts.update(names)
        if names != trace.signals:
            store.traces.set_signals(trace.id, names)
    failures = _failures(store, line, since, settings)
    log("capture.flagged", line=line, looked_at=len(traces), failures=len(failures), **counts)
    return failures


def _unseen(store: Store, line: str, since: float, looked: float, limit: int) -> list[Trace]:
    """Traces newer than `looked`, and those between `since` and then that feedback newer than `looked` is about."""
    fresh = store.traces.list(origin="production", line=line, since=max(since, looked), limit=limit)
    if looked <= since:
        return fresh
    known = {id for trace in fresh for id in (trace.id, *(turn.id for turn in trace.turns))}
    about = {row.target for row in store.feedback.list(line, looked, limit=limit, newest_first=True)} - known
    late = {trace.id: trace for target in sorted(about) if (trace := _target(store, target)) is not None}
    return [*fresh, *(trace for trace in late.values() if trace.origin == "production" and trace.at >= since)]


def _target(store: Store, id: str) -> Trace | None:
    """The trace that feedback is about: its target is a turn's id or the trace's own."""
    with contextlib.suppress(NotFound):
        return store.traces.get(store.traces.turn(id).trace)
    with contextlib.suppress(NotFound):
        return store.traces.get(id)
    return None


def _failures(store: Store, line: str, since: float, settings: CaptureSettings) -> list[Trace]:
    found: dict[str, Trace] = {}
    for name in settings.failures:
        for trace in store.traces.list(
            origin="production", line=line, signal=name, since=since, limit=settings.max_traces
        ):
            found[trace.id] = trace
    return sorted(found.values(), key=lambda trace: (trace.at, trace.id))


def resolve(names: Sequence[str]) -> list[Signal]:
    """Signals by name. Raises ConfigError for a name that nobody knows."""
    return [BUILT_IN[name] if name in BUILT_IN else plugins.resolve("signal", name) for name in names]


def unread(turn: Turn) -> bool:
    """Whether a reply that was offered tools began a call that no format could read. Where none were offered, such
    text is text; where the reply was cut off, the rest of the call may have been to come."""
    if not turn.tools or turn.reply.tool_calls or turn.is_cut:
        return False
    return any(opening in (turn.reply.content or "") for opening in OPENINGS)


def fits(call: ToolCall, schemas: dict[str, dict[str, object]]) -> bool:
    """Whether a call names one of the tools and its arguments satisfy that tool's schema. A schema that is itself
    broken accepts every JSON object: that is the tool's fault, not the model's. So does one that refers to another by
    an address: callers write schemas, and the default registry would fetch what they name from inside our network."""
    if call.name not in schemas:
        return False
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    if not isinstance(arguments, dict):
        return False
    schema = schemas[call.name]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
        return bool(kind(schema, registry=Registry()).is_valid(arguments))
    except (jsonschema.SchemaError, Unresolvable, RecursionError, re.error):
        return True


def _tool_failures(trace: Trace) -> list[bool]:
    said = paths.messages(paths.last_path(trace))
    return [paths.tool_failed(message) for message in said if message.role == "tool"]


def _said(content: str | None, calls: tuple[ToolCall, ...]) -> tuple[str, tuple[tuple[str, str], ...]]:
    return (content or "").strip(), tuple((call.name, call.arguments) for call in calls)
