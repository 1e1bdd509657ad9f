"""Connections and transactions: one way to read, one way to write, and errors that name the file.

On SQLite a write is BEGIN IMMEDIATE with a busy timeout and a few retries, so that several processes share the file;
a durable write commits with synchronous=FULL (it survives a power cut, the others survive kill -9). Knows no table.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from honed.errors import StoreError

T = TypeVar("T")
NUM_TRIES = 5
CHUNK = 500
"""How many values go into one IN (...): well under every database's limit of parameters."""


class Database:
    """A database's connections. Thread-safe; made after a fork, never carried through one."""

    def __init__(self, url: sa.URL, *, busy_seconds: float = 30.0) -> None:
        self.url = url
        self.name = url.database if self.is_sqlite and url.database else url.render_as_string(hide_password=True)
        self._busy_seconds = busy_seconds
        self._normal = self._engine("NORMAL")
        self._durable = self._engine("FULL")

    @property
    def is_sqlite(self) -> bool:
        """Whether the file-based rules apply."""
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A connection that sees one snapshot. Raises StoreError when the database can't be read."""
        with self.named_errors(), self._normal.connect() as connection, connection.begin():
            yield connection

    def write(self, work: Callable[[sa.Connection], T], *, durable: bool = False) -> T:
        """Runs `work` in one transaction and returns what it returns; all of it happens, or nothing.

        `work` may run again when the database was busy, so it must have no other effect. Raises StoreError when the
        database stays busy or can't be written.
        """
        engine = self._durable if durable else self._normal
        with self.named_errors():
            for attempt in range(NUM_TRIES):
                try:
                    with engine.connect() as connection:
                        connection = connection.execution_options(honed_write=True)
                        with connection.begin():
                            return work(connection)
                except sa.exc.OperationalError as error:
                    if not _is_busy(error) or attempt == NUM_TRIES - 1:
                        raise
                    time.sleep(random.uniform(0.01, 0.1) * 2**attempt)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Closes idle connections; a connection in use closes when it is returned."""
        self._normal.dispose()
        self._durable.dispose()

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Turns a driver's error into a StoreError that names the database."""
        try:
            yield
        except sa.exc.DBAPIError as error:
            if _is_busy(error):
                raise StoreError(
                    f"{self.name} stayed locked by another process for {self._busy_seconds:g} seconds."
                    " Look for a process that holds a transaction open."
                ) from error
            raise StoreError(f"{self.name} cannot be used: {error.orig}.") from error

    def _engine(self, synchronous: str) -> sa.Engine:
        if not self.is_sqlite:
            return sa.create_engine(self.url)
        engine = sa.create_engine(
            self.url,
            poolclass=sa.QueuePool,
            pool_size=8,
            max_overflow=-1,
            connect_args={"check_same_thread": False, "timeout": self._busy_seconds},
        )
        sa.event.listen(engine, "connect", _configure(synchronous))
        sa.event.listen(engine, "begin", _begin)
        return engine


def insert_new(connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> int:
    """Inserts the rows whose keys are new, leaves the others as they are, and returns how many were new."""
    if not rows:
        return 0
    statement = _insert(connection, table).on_conflict_do_nothing()
    return max(connection.execute(statement, list(rows)).rowcount, 0)


def upsert(connection: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> None:
    """Inserts a row, or sets the other columns of the row that has its primary key."""
    keys = [column.name for column in table.primary_key]
    statement = _insert(connection, table)
    changed = {name: statement.excluded[name] for name in row if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), [dict(row)])


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """The values in pieces that fit one IN (...)."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def _insert(connection: sa.Connection, table: sa.Table) -> Any:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    return dialect.insert(table)


def _configure(synchronous: str) -> Callable[[Any, Any], None]:
    def configure(connection: sqlite3.Connection, record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late; `_begin` says it instead
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA foreign_keys=ON")

    return configure


def _begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("honed_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_busy(error: sa.exc.DBAPIError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", 0)
    return (code & 0xFF) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
