import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from honed.errors import StoreError
from honed.store.database import CHUNK, Database, chunks, insert_new, upsert
from honed.store.schema import metadata

NUMBERS = sa.Table(
    "numbers",
    sa.MetaData(),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Integer, nullable=False),
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(sa.URL.create("sqlite", database=str(tmp_path / "x.db")))
    opened.write(NUMBERS.create)
    yield opened
    opened.close()


def rows(database: Database) -> dict[str, int]:
    with database.read() as connection:
        return {row.name: row.value for row in connection.execute(sa.select(NUMBERS))}


@pytest.mark.parametrize(("durable", "level"), [(False, 1), (True, 2)])
def test_a_durable_write_is_synchronous_full(database: Database, durable: bool, level: int) -> None:
    found = database.write(lambda c: c.exec_driver_sql("PRAGMA synchronous").scalar(), durable=durable)
    assert found == level


def test_a_write_that_raises_leaves_nothing(database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        insert_new(connection, NUMBERS, [{"name": "a", "value": 1}])
        raise KeyError("stop")

    with pytest.raises(KeyError):
        database.write(work)
    assert rows(database) == {}


def test_a_busy_write_runs_again(database: Database) -> None:
    attempts = []

    def work(connection: sa.Connection) -> str:
        attempts.append(insert_new(connection, NUMBERS, [{"name": "a", "value": 1}]))
        if len(attempts) < 3:
            busy = sqlite3.OperationalError("database is locked")
            busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise sa.exc.OperationalError("COMMIT", {}, busy)
        return "done"

    assert database.write(work) == "done"
    assert attempts == [1, 1, 1], "what a failed try wrote was taken back"
    assert rows(database) == {"a": 1}


def test_a_writer_holds_the_lock_from_the_start(database: Database) -> None:
    def work(connection: sa.Connection) -> None:
        with closing(sqlite3.connect(database.name, timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")

    with pytest.raises(sqlite3.OperationalError, match="locked"):
        database.write(work)


def test_insert_new_leaves_what_is_there_and_counts(database: Database) -> None:
    def work(connection: sa.Connection) -> list[int]:
        return [
            insert_new(connection, NUMBERS, []),
            insert_new(connection, NUMBERS, [{"name": "a", "value": 1}, {"name": "b", "value": 2}]),
            insert_new(connection, NUMBERS, [{"name": "a", "value": 9}, {"name": "c", "value": 3}]),
        ]

    assert database.write(work) == [0, 2, 1]
    assert rows(database) == {"a": 1, "b": 2, "c": 3}


def test_upsert_replaces(database: Database) -> None:
    for value in (1, 2):
        database.write(lambda c, value=value: upsert(c, NUMBERS, {"name": "a", "value": value}))
    assert rows(database) == {"a": 2}


def test_a_drivers_error_names_the_file(database: Database) -> None:
    with pytest.raises(StoreError, match=f"{database.name} cannot be used: no such table: absent"):
        database.write(lambda connection: connection.execute(sa.text("SELECT * FROM absent")))


def test_chunks_hold_everything_once() -> None:
    values = list(range(CHUNK * 2 + 1))
    pieces = list(chunks(values))
    assert [len(piece) for piece in pieces] == [CHUNK, CHUNK, 1]
    assert [value for piece in pieces for value in piece] == values


def test_the_schema_can_be_said_to_postgresql() -> None:
    for table in metadata.sorted_tables:
        assert "CREATE TABLE" in str(sa.schema.CreateTable(table).compile(dialect=postgresql.dialect()))
