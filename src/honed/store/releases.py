"""Releases: the row that decides what serves a line, and which replicas have followed it."""

from __future__ import annotations

import time

import sqlalchemy as sa

from honed import codec
from honed.errors import Refused
from honed.store.database import Database, insert_new, upsert
from honed.store.schema import releases, replicas
from honed.types import Release


class Releases:
    """From a row's commit on, its version serves its line; rows are only added."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, release: Release, *, replaces: str | None = None) -> None:
        """Releases; survives a power cut once it returns. Putting the same id again does nothing.

        With `replaces`, a version id, raises Refused unless that is what serves the line at this moment: two writers
        (a promotion and a rollback) cannot both succeed.
        """
        row = {
            "id": release.id,
            "line": release.line,
            "version": release.version,
            "kind": release.kind,
            "body": codec.encode(release),
            "at": release.at,
        }

        def work(connection: sa.Connection) -> None:
            stored = connection.execute(sa.select(releases.c.id).where(releases.c.id == release.id)).first()
            serving = _current(connection, release.line)
            if stored is None and replaces is not None and (serving is None or serving.version != replaces):
                now = "nothing" if serving is None else serving.version
                raise Refused(f"{release.line} is served by {now}, not by {replaces}: another release came first.")
            insert_new(connection, releases, [row])

        self._database.write(work, durable=True)

    def current(self, line: str) -> Release | None:
        """What serves a line: its last committed release; None when only the base model ever did."""
        with self._database.read() as connection:
            return _current(connection, line)

    def ack(self, replica: str, release_id: str, version: str) -> None:
        """A replica says that it serves `version` as a release asked."""
        row = {"replica": replica, "release": release_id, "version": version, "at": time.time()}
        self._database.write(lambda connection: upsert(connection, replicas, row))

    def acks(self, release_id: str) -> dict[str, str]:
        """Replica name -> version, of those that have followed a release."""
        query = sa.select(replicas.c.replica, replicas.c.version).where(replicas.c.release == release_id)
        with self._database.read() as connection:
            return {row.replica: row.version for row in connection.execute(query.order_by(replicas.c.replica))}

    def list(self, line: str | None = None) -> list[Release]:
        """Releases in the order of their commits, of one line if given."""
        query = sa.select(releases.c.body).order_by(releases.c.seq)
        if line is not None:
            query = query.where(releases.c.line == line)
        with self._database.read() as connection:
            return [codec.decode(row.body, Release) for row in connection.execute(query)]


def _current(connection: sa.Connection, line: str) -> Release | None:
    last = sa.select(releases.c.body).where(releases.c.line == line).order_by(releases.c.seq.desc()).limit(1)
    body = connection.execute(last).scalar()
    return None if body is None else codec.decode(body, Release)
