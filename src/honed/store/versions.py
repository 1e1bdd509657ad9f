"""Versions, what taught them, and the gate's verdicts: a line's history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import sqlalchemy as sa

from honed import codec
from honed.errors import NotFound, Refused
from honed.store.database import Database, insert_new
from honed.store.schema import tasks, traces, verdicts, version_data, versions
from honed.types import Verdict, Version

Role = Literal["demonstration", "replay", "practice"]
"""What a trace was to a version: shown by a person, a production success rehearsed, or an attempt at a task."""


class Versions:
    """Points of every line's history. Number 0 is the base model and exists without a row."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, version: Version, taught: Mapping[Role, Sequence[str]] | None = None) -> None:
        """Stores a version with the ids of the traces it learned from, by role; survives a power cut once it returns.

        Putting the same version again does nothing; raises Refused for another one under a number that is taken.
        """

        def work(connection: sa.Connection) -> None:
            row = {
                "line": version.line,
                "number": version.number,
                "id": version.id,
                "parent": version.parent,
                "body": codec.encode(version),
                "at": version.at,
            }
            if not insert_new(connection, versions, [row]):
                stored = connection.execute(sa.select(versions.c.body).where(versions.c.id == version.id)).scalar_one()
                if codec.decode(stored, Version) != version:
                    raise Refused(f"{version.id} exists with other contents; take the next number of the line.")
            data = {id: role for role, ids in reversed(list((taught or {}).items())) for id in ids}
            rows = [{"version": version.id, "trace": id, "role": role} for id, role in data.items()]
            insert_new(connection, version_data, rows)

        self._database.write(work, durable=True)

    def get(self, line: str, number: int) -> Version:
        """One version. Raises NotFound, except for number 0: the base model."""
        query = sa.select(versions.c.body).where(versions.c.line == line, versions.c.number == number)
        with self._database.read() as connection:
            body = connection.execute(query).scalar()
        if body is not None:
            return codec.decode(body, Version)
        if number == 0:
            return Version(line=line, number=0)
        raise NotFound(f"no version {line}@{number} in {self._database.name}.")

    def find(self, id: str) -> Version:
        """The version that a name like "line@3" stands for. Raises NotFound."""
        line, _, number = id.rpartition("@")
        if not line or not number.isdecimal():
            raise NotFound(f"{id!r} names no version; write line@number.")
        return self.get(line, int(number))

    def next_number(self, line: str) -> int:
        """The number after the line's last; 1 for a new line."""
        with self._database.read() as connection:
            last = connection.execute(sa.select(sa.func.max(versions.c.number)).where(versions.c.line == line)).scalar()
        return (last or 0) + 1

    def lineage(self, id: str) -> list[Version]:
        """A version and its ancestors, youngest first, down to the base. Raises NotFound."""
        found = [self.find(id)]
        while found[-1].parent is not None:
            found.append(self.get(found[-1].line, found[-1].parent))
        return found

    def sources(self, version_id: str, *, role: Role | None = None) -> list[tuple[str, str | None, str | None]]:
        """(trace id, task id, source trace id): what taught a version, and which production failure was behind it.

        The source is the trace that the task came from, and None where a generator made the task or where a success
        was replayed. `role` narrows to what the traces were.
        """
        origin = traces.alias("origin")
        query = (
            sa.select(version_data.c.trace, traces.c.task, origin.c.id.label("source"))
            .select_from(version_data)
            .outerjoin(traces, traces.c.id == version_data.c.trace)
            .outerjoin(tasks, tasks.c.id == traces.c.task)
            .outerjoin(origin, origin.c.id == tasks.c.source)
            .where(version_data.c.version == version_id)
            .order_by(version_data.c.trace)
        )
        if role is not None:
            query = query.where(version_data.c.role == role)
        with self._database.read() as connection:
            return [(row.trace, row.task, row.source) for row in connection.execute(query)]

    def taught_by(self, trace_id: str) -> list[str]:
        """The ids of the versions that a trace taught, directly or through tasks made from it; oldest first."""
        query = (
            sa.select(versions.c.id)
            .select_from(version_data)
            .join(versions, versions.c.id == version_data.c.version)
            .outerjoin(traces, traces.c.id == version_data.c.trace)
            .outerjoin(tasks, tasks.c.id == traces.c.task)
            .where(sa.or_(version_data.c.trace == trace_id, tasks.c.source == trace_id))
            .group_by(versions.c.id, versions.c.line, versions.c.number)
            .order_by(versions.c.line, versions.c.number)
        )
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def list(self, line: str | None = None) -> list[Version]:
        """Stored versions by line and number."""
        query = sa.select(versions.c.body).order_by(versions.c.line, versions.c.number)
        if line is not None:
            query = query.where(versions.c.line == line)
        with self._database.read() as connection:
            return [codec.decode(row.body, Version) for row in connection.execute(query)]


class Verdicts:
    """What the gate decided."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, verdict: Verdict) -> None:
        """Stores a verdict; one that is stored stays as it is. Survives a power cut once it returns."""
        row = {
            "id": verdict.id,
            "version": verdict.version,
            "baseline": verdict.baseline,
            "decision": verdict.decision,
            "body": codec.encode(verdict),
            "at": verdict.at,
        }
        self._database.write(lambda connection: insert_new(connection, verdicts, [row]), durable=True)

    def get(self, id: str) -> Verdict:
        """One verdict. Raises NotFound."""
        with self._database.read() as connection:
            body = connection.execute(sa.select(verdicts.c.body).where(verdicts.c.id == id)).scalar()
        if body is None:
            raise NotFound(f"no verdict {id!r} in {self._database.name}.")
        return codec.decode(body, Verdict)

    def list(self, version: str | None = None) -> list[Verdict]:
        """Verdicts by time, of one version id if given."""
        query = sa.select(verdicts.c.body).order_by(verdicts.c.at, verdicts.c.id)
        if version is not None:
            query = query.where(verdicts.c.version == version)
        with self._database.read() as connection:
            return [codec.decode(row.body, Verdict) for row in connection.execute(query)]
