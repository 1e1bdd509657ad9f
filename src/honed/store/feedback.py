"""Feedback: append-only statements about turns and traces, early or late, and the live success that follows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from honed import codec
from honed.store.database import Database, chunks, insert_new
from honed.store.schema import feedback, traces, turns
from honed.types import Feedback, Message


class Feedbacks:
    """What users, verifiers and support teams said."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, rows: Sequence[Feedback]) -> int:
        """Stores the rows that are new by id and by (tenant, key); returns how many were. Targets may come later."""
        return self._database.write(lambda c: insert_new(c, feedback, [feedback_row(row) for row in rows]))

    def of(self, targets: Sequence[str], *, tenant: str | None = None) -> list[Feedback]:
        """What was said of these turns or traces, oldest first. `tenant` is exact when given."""
        where = [] if tenant is None else [feedback.c.tenant == tenant]
        found: list[Feedback] = []
        with self._database.read() as connection:
            for some in chunks(list(dict.fromkeys(targets))):
                query = sa.select(feedback).where(feedback.c.target.in_(some), *where)
                found += [feedback_from(row) for row in connection.execute(query).mappings()]
        return sorted(found, key=lambda row: (row.at, row.id))

    def live(
        self, line: str, version: str | None = None, name: str = "success", since: float | None = None
    ) -> list[tuple[str, str, float, float]]:
        """(trace id, version, value, at) of a metric on a line's production traffic, oldest first.

        `version` is what sampled the target's last token (of the trace's last turn where the target is a trace). The
        latest row of each (target, name) counts, a bool as 0 or 1; another tenant's feedback than the trace's does not.
        """
        answered = _last_version().label("version")
        rank = sa.func.row_number().over(
            partition_by=(feedback.c.target, feedback.c.name), order_by=(feedback.c.at.desc(), feedback.c.id.desc())
        )
        said = (
            sa.select(traces.c.id.label("trace"), answered, feedback.c.number, feedback.c.at, rank.label("rank"))
            .select_from(_with_trace())
            .where(
                traces.c.line == line,
                traces.c.origin == "production",
                feedback.c.tenant == traces.c.tenant,
                feedback.c.kind == "metric",
                feedback.c.name == name,
                feedback.c.number.is_not(None),
            )
            .subquery()
        )
        query = sa.select(said.c.trace, said.c.version, said.c.number, said.c.at).where(said.c.rank == 1)
        if version is not None:
            query = query.where(said.c.version == version)
        if since is not None:
            query = query.where(said.c.at >= since)
        with self._database.read() as connection:
            found = connection.execute(query.order_by(said.c.at, said.c.trace))
            return [(row.trace, row.version or "", row.number, row.at) for row in found]

    def list(
        self,
        line: str | None = None,
        since: float | None = None,
        *,
        kind: str | None = None,
        tenant: str | None = None,
        limit: int | None = 1000,
        newest_first: bool = False,
    ) -> list[Feedback]:
        """Feedback by time. With a `line`, only what targets a stored trace (or turn) of that line."""
        query = sa.select(feedback)
        if line is not None:
            query = query.select_from(_with_trace()).where(traces.c.line == line)
        if since is not None:
            query = query.where(feedback.c.at >= since)
        if kind is not None:
            query = query.where(feedback.c.kind == kind)
        if tenant is not None:
            query = query.where(feedback.c.tenant == tenant)
        order = (feedback.c.at, feedback.c.id)
        query = query.order_by(*((column.desc() for column in order) if newest_first else order)).limit(limit)
        with self._database.read() as connection:
            return [feedback_from(row) for row in connection.execute(query).mappings()]


def feedback_row(said: Feedback) -> dict[str, Any]:
    """The row of a feedback; a metric's number is a column so that it can be joined on."""
    is_number = said.kind == "metric" and isinstance(said.value, bool | int | float)
    return {
        "id": said.id,
        "target": said.target,
        "name": said.name,
        "kind": said.kind,
        "source": said.source,
        "tenant": said.tenant,
        "key": said.key,
        "number": float(said.value) if is_number else None,
        "value": codec.encode(said.value),
        "at": said.at,
    }


def feedback_from(row: Any) -> Feedback:
    """The feedback of a row; a demonstration's or correction's messages come back as a tuple of Message."""
    value: Any = codec.decode(row["value"], Any)
    if row["kind"] in ("demonstration", "correction"):
        with contextlib.suppress(msgspec.ValidationError):  # whoever reads it says what is wrong with it
            value = msgspec.convert(value, tuple[Message, ...])
    return Feedback(
        id=row["id"],
        target=row["target"],
        name=row["name"],
        kind=row["kind"],
        source=row["source"],
        tenant=row["tenant"],
        key=row["key"],
        value=value,
        at=row["at"],
    )


def _with_trace() -> sa.FromClause:
    """Feedback beside the turn it targets, if any, and the trace it targets or whose turn it targets."""
    by_turn = feedback.outerjoin(turns, turns.c.id == feedback.c.target)
    return by_turn.join(traces, traces.c.id == sa.func.coalesce(turns.c.trace, feedback.c.target))


def _last_version() -> sa.ColumnElement[str]:
    other = turns.alias("later")
    last = (
        sa.select(other.c.version)
        .where(other.c.trace == traces.c.id)
        .order_by(other.c.position.desc())
        .limit(1)
        .correlate(traces)
        .scalar_subquery()
    )
    return sa.func.coalesce(turns.c.version, last)
