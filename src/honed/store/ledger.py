"""The ledger: every second and token that was spent, waste included. What has no price is counted, never 0."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from honed.errors import UserError
from honed.store.database import Database, insert_new
from honed.store.rows import turn_from
from honed.store.schema import entries, traces, turns
from honed.types import Entry, Noun, Turn

GROUPS = ("activity", "outcome", "stage", "line", "device", "subject")


class Total(Noun, frozen=True, kw_only=True):
    """A sum of entries. `group` holds the values of the columns that were grouped by.

    `dollars` is the sum of those that have a price, None when none has; `num_unpriced` counts the others.
    """

    group: dict[str, str]
    num_entries: int
    seconds: float
    tokens: int
    dollars: float | None
    num_unpriced: int


class Ledger:
    """Entries, append-only."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, new: Sequence[Entry]) -> int:
        """Stores the entries whose ids are new, and returns how many were."""
        rows = [msgspec.structs.asdict(entry) for entry in new]
        return self._database.write(lambda connection: insert_new(connection, entries, rows))

    def unpaid(self, line: str, prefix: str) -> list[Turn]:
        """Production turns of a line that no entry pays for, oldest first: one whose id is `prefix` and the turn's."""
        paid = sa.select(entries.c.id).where(entries.c.id == sa.literal(prefix).concat(turns.c.id)).exists()
        served = turns.join(traces, traces.c.id == turns.c.trace)
        query = sa.select(turns).select_from(served).order_by(turns.c.at, turns.c.id)
        query = query.where(traces.c.line == line, traces.c.origin == "production", ~paid)
        with self._database.read() as connection:
            return [turn_from(row) for row in connection.execute(query).mappings()]

    def totals(
        self,
        line: str | None = None,
        by: Sequence[str] = ("activity", "outcome"),
        *,
        since: float | None = None,
        until: float | None = None,
        stage: str | None = None,
        subject: str | None = None,
    ) -> list[Total]:
        """Sums grouped by columns (see GROUPS; none of them: one total), ordered by them."""
        unknown = [name for name in by if name not in GROUPS]
        if unknown:
            raise UserError(f"the ledger cannot be grouped by {unknown[0]!r}; use {', '.join(GROUPS)}.")
        columns = [entries.c[name] for name in by]
        query = (
            sa.select(
                *columns,
                sa.func.count().label("num_entries"),
                sa.func.coalesce(sa.func.sum(entries.c.seconds), 0.0).label("seconds_sum"),
                sa.func.coalesce(sa.func.sum(entries.c.tokens), 0).label("tokens_sum"),
                sa.func.sum(entries.c.dollars).label("dollars_sum"),
                sa.func.count(entries.c.dollars).label("num_priced"),
            )
            .where(*_filters(line, stage, subject, since, until))
            .group_by(*columns)
            .order_by(*columns)
        )
        with self._database.read() as connection:
            return [
                Total(
                    group={name: row._mapping[name] for name in by},
                    num_entries=row.num_entries,
                    seconds=row.seconds_sum,
                    tokens=int(row.tokens_sum),
                    dollars=row.dollars_sum,
                    num_unpriced=row.num_entries - row.num_priced,
                )
                for row in connection.execute(query)
            ]

    def list(
        self,
        line: str | None = None,
        since: float | None = None,
        stage: str | None = None,
        subject: str | None = None,
        *,
        until: float | None = None,
        limit: int | None = None,
    ) -> list[Entry]:
        """Entries by time, `since` <= at < `until`."""
        where = _filters(line, stage, subject, since, until)
        query = sa.select(entries).where(*where).order_by(entries.c.at, entries.c.id).limit(limit)
        with self._database.read() as connection:
            return [Entry(**row) for row in connection.execute(query).mappings()]


def _filters(
    line: str | None, stage: str | None, subject: str | None, since: float | None, until: float | None
) -> list[sa.ColumnElement[bool]]:
    exact = {"line": line, "stage": stage, "subject": subject}
    where: list[sa.ColumnElement[bool]] = [
        entries.c[name] == value for name, value in exact.items() if value is not None
    ]
    if since is not None:
        where.append(entries.c.at >= since)
    if until is not None:
        where.append(entries.c.at < until)
    return where
