"""Traces and their turns: what the capture log drains into, and what everything else reads.

A turn is one row: ids as int32 and log-probabilities as float32 in zstd columns (engines compute float32; reading
returns exactly the float32 values). A trace's live score is not here, see feedback.py.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from honed import codec
from honed.errors import NotFound, Refused
from honed.store import rows
from honed.store.database import Database, chunks, insert_new, upsert
from honed.store.feedback import feedback_row
from honed.store.schema import feedback, offsets, signals, toolsets, traces, turns
from honed.types import Captured, Tool, Trace, Turn

MAX_PATH = 10_000


class Traces:
    """The one record of conversations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def capture(self, records: Sequence[Captured], log: str, offset: int) -> int:
        """Stores what a capture log holds up to `offset`, and the offset, in one transaction.

        Creates a trace on its first turn. A turn or a feedback that is already stored is left as it is, and the
        offset never moves back, so that a replay changes nothing. Returns the number of new turns and feedbacks.
        """

        def work(connection: sa.Connection) -> int:
            heads: dict[str, Trace] = {}
            new_turns: dict[str, list[Turn]] = defaultdict(list)
            for record in records:
                if record.turn is not None:
                    trace = _head_of(record, record.turn)
                    first = heads.setdefault(trace.id, trace)
                    if trace.tools and not first.tools:
                        heads[trace.id] = trace
                    new_turns[trace.id].append(record.turn)
            _insert_heads(connection, heads.values())
            num_new = _append(connection, [(heads[id], turn) for id, added in new_turns.items() for turn in added])
            said = [feedback_row(record.feedback) for record in records if record.feedback is not None]
            num_new += insert_new(connection, feedback, said)
            if offset > _offset(connection, log):
                upsert(connection, offsets, {"log": log, "offset": offset})
            return num_new

        return self._database.write(work)

    def offset(self, log: str) -> int:
        """How much of a capture log is stored, in bytes; 0 for one never seen."""
        with self._database.read() as connection:
            return _offset(connection, log)

    def put(self, trace: Trace) -> None:
        """Stores a whole trace, or brings a stored one up to date: its particulars are replaced, its new turns added.

        Turns that are stored stay as they are. Raises Refused when a turn names another trace.
        """
        self._database.write(lambda connection: put_trace(connection, trace))

    def get(self, id: str) -> Trace:
        """One trace with its turns. Raises NotFound."""
        with self._database.read() as connection:
            found = _read(connection, sa.select(traces).where(traces.c.id == id), with_turns=True)
        if not found:
            raise NotFound(f"no trace {id!r} in {self._database.name}.")
        return found[0]

    def turn(self, id: str) -> Turn:
        """One turn, by the receipt that its response carried. Raises NotFound."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(turns).where(turns.c.id == id)).mappings().first()
        if row is None:
            raise NotFound(f"no turn {id!r} in {self._database.name}.")
        return rows.turn_from(row)

    def tools(self, digest: str) -> tuple[Tool, ...]:
        """The tool list that a turn's `tools` digest stands for; empty for "". Raises NotFound."""
        if not digest:
            return ()
        with self._database.read() as connection:
            body = connection.execute(sa.select(toolsets.c.body).where(toolsets.c.digest == digest)).scalar()
        if body is None:
            raise NotFound(f"no tool list {digest!r} in {self._database.name}.")
        return codec.decode(body, tuple[Tool, ...])

    def path(self, turn_id: str) -> list[Turn]:
        """The branch that ends in a turn, root first: what the engine had read when it answered.

        Raises NotFound when the turn or one of its ancestors is not stored (yet).
        """
        start = sa.select(turns.c.id, turns.c.parent, sa.literal(0).label("depth")).where(turns.c.id == turn_id)
        branch = start.cte("branch", recursive=True)
        step = sa.select(turns.c.id, turns.c.parent, branch.c.depth + 1).join(branch, turns.c.id == branch.c.parent)
        branch = branch.union_all(step.where(branch.c.depth < MAX_PATH))
        query = sa.select(turns).join(branch, turns.c.id == branch.c.id).order_by(branch.c.depth.desc())
        with self._database.read() as connection:
            path = [rows.turn_from(row) for row in connection.execute(query).mappings()]
        if not path:
            raise NotFound(f"no turn {turn_id!r} in {self._database.name}.")
        if path[0].parent is not None:
            raise NotFound(f"the turn {turn_id!r} stands on {path[0].parent!r}, which is not in {self._database.name}.")
        return path

    def count(
        self,
        *,
        origin: str | None = None,
        line: str | None = None,
        tenant: str | None = None,
        task: str | None = None,
        signal: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> int:
        """How many traces `list` would find without a limit."""
        where = _filters(origin, line, tenant, task, signal, since, until)
        with self._database.read() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(traces).where(*where)).scalar_one()

    def set_signals(self, id: str, names: Iterable[str]) -> None:
        """Replaces what looked wrong in a trace. Raises NotFound."""

        def work(connection: sa.Connection) -> None:
            if connection.execute(sa.select(traces.c.id).where(traces.c.id == id)).first() is None:
                raise NotFound(f"no trace {id!r} in {self._database.name}.")
            _replace_signals(connection, id, names)

        self._database.write(work)

    def list(
        self,
        *,
        origin: str | None = None,
        line: str | None = None,
        tenant: str | None = None,
        task: str | None = None,
        signal: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = 100,
        newest_first: bool = True,
        with_turns: bool = True,
    ) -> list[Trace]:
        """Traces by time, `since` <= at < `until`. `tenant` is exact when given. `with_turns` False omits turns."""
        where = _filters(origin, line, tenant, task, signal, since, until)
        order = (traces.c.at.desc(), traces.c.id.desc()) if newest_first else (traces.c.at, traces.c.id)
        query = sa.select(traces).where(*where).order_by(*order).limit(limit)
        with self._database.read() as connection:
            return _read(connection, query, with_turns)


def put_trace(connection: sa.Connection, trace: Trace) -> None:
    """`Traces.put` inside a transaction of the caller's."""
    stray = next((turn for turn in trace.turns if turn.trace != trace.id), None)
    if stray is not None:
        raise Refused(
            f"the turn {stray.id!r} belongs to the trace {stray.trace!r}, and cannot be put into {trace.id!r}."
        )
    _insert_tools(connection, [trace.tools])
    upsert(connection, traces, rows.trace_row(trace))
    _replace_signals(connection, trace.id, trace.signals)
    _append(connection, [(trace, turn) for turn in trace.turns])


def _head_of(record: Captured, turn: Turn) -> Trace:
    return Trace(
        id=turn.trace,
        origin=record.origin,
        line=record.line,
        task=record.task,
        tools=record.tools,
        tags=record.tags,
        tenant=record.tenant,
        at=turn.at,
    )


def _insert_heads(connection: sa.Connection, heads: Iterable[Trace]) -> None:
    heads = list(heads)
    _insert_tools(connection, [head.tools for head in heads])
    insert_new(connection, traces, [rows.trace_row(head) for head in heads])
    for head in heads:
        if head.tools:  # a trace can begin without tools; it keeps its first list, each turn the digest of its own
            connection.execute(
                sa.update(traces)
                .where(traces.c.id == head.id, traces.c.tools == "")
                .values(tools=codec.tools_digest(head.tools))
            )


def _insert_tools(connection: sa.Connection, tool_lists: Iterable[tuple[Tool, ...]]) -> None:
    found = {codec.tools_digest(tools): tools for tools in tool_lists if tools}
    insert_new(connection, toolsets, [{"digest": key, "body": codec.encode(tools)} for key, tools in found.items()])


def _append(connection: sa.Connection, added: Sequence[tuple[Trace, Turn]]) -> int:
    """Adds the turns that are new behind those that their traces have; returns how many were."""
    unique: dict[str, tuple[Trace, Turn]] = {}
    for trace, turn in added:
        unique.setdefault(turn.id, (trace, turn))
    for some in chunks(list(unique)):
        for id in connection.execute(sa.select(turns.c.id).where(turns.c.id.in_(some))).scalars():
            del unique[id]
    places = _next_places(connection, list({trace.id for trace, _ in unique.values()}))
    new_rows = [rows.turn_row(turn, trace, next(places[trace.id])) for trace, turn in unique.values()]
    if new_rows:
        connection.execute(sa.insert(turns), new_rows)
    return len(new_rows)


def _next_places(connection: sa.Connection, trace_ids: Sequence[str]) -> dict[str, Iterator[int]]:
    last = dict.fromkeys(trace_ids, -1)
    for some in chunks(trace_ids):
        query = sa.select(turns.c.trace, sa.func.max(turns.c.position)).where(turns.c.trace.in_(some))
        last |= {row[0]: row[1] for row in connection.execute(query.group_by(turns.c.trace))}
    return {trace: itertools.count(position + 1) for trace, position in last.items()}


def _replace_signals(connection: sa.Connection, id: str, names: Iterable[str]) -> None:
    connection.execute(sa.delete(signals).where(signals.c.trace == id))
    unique = dict.fromkeys(names)
    insert_new(connection, signals, [{"trace": id, "name": name, "position": i} for i, name in enumerate(unique)])


def _offset(connection: sa.Connection, log: str) -> int:
    return connection.execute(sa.select(offsets.c.offset).where(offsets.c.log == log)).scalar() or 0


def _filters(
    origin: str | None,
    line: str | None,
    tenant: str | None,
    task: str | None,
    signal: str | None,
    since: float | None,
    until: float | None,
) -> list[sa.ColumnElement[bool]]:
    exact = {"origin": origin, "line": line, "tenant": tenant, "task": task}
    where: list[sa.ColumnElement[bool]] = [
        traces.c[name] == value for name, value in exact.items() if value is not None
    ]
    if signal is not None:
        where.append(traces.c.id.in_(sa.select(signals.c.trace).where(signals.c.name == signal)))
    if since is not None:
        where.append(traces.c.at >= since)
    if until is not None:
        where.append(traces.c.at < until)
    return where


def read_traces(connection: sa.Connection, ids: Sequence[str]) -> dict[str, Trace]:
    """The stored traces among `ids`, turns included, inside a transaction of the caller's."""
    found: dict[str, Trace] = {}
    for some in chunks(ids):
        query = sa.select(traces).where(traces.c.id.in_(some))
        found |= {trace.id: trace for trace in _read(connection, query, with_turns=True)}
    return found


def _read(connection: sa.Connection, query: sa.Select[Any], with_turns: bool) -> list[Trace]:
    heads = connection.execute(query).mappings().all()
    ids = [head["id"] for head in heads]
    told: dict[str, list[str]] = defaultdict(list)
    said: dict[str, list[Turn]] = defaultdict(list)
    tools: dict[str, tuple[Tool, ...]] = {"": ()}
    for some in chunks(ids):
        for row in connection.execute(
            sa.select(signals).where(signals.c.trace.in_(some)).order_by(signals.c.trace, signals.c.position)
        ):
            told[row.trace].append(row.name)
        if with_turns:
            ordered = sa.select(turns).where(turns.c.trace.in_(some)).order_by(turns.c.trace, turns.c.position)
            for turn in map(rows.turn_from, connection.execute(ordered).mappings()):
                said[turn.trace].append(turn)
    for some in chunks(list({head["tools"] for head in heads})):
        for row in connection.execute(sa.select(toolsets).where(toolsets.c.digest.in_(some))):
            tools[row.digest] = codec.decode(row.body, tuple[Tool, ...])
    return [
        rows.trace_from(head, tools[head["tools"]], tuple(told[head["id"]]), tuple(said[head["id"]])) for head in heads
    ]
