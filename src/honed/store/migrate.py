"""Brings a database to this code's schema, or refuses before anything is touched.

Alembic is imported only when there is something to migrate: it costs every command 0.2 seconds otherwise. A file that
is no database, a database that something else made, and one that a newer honed wrote are refused by name.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from honed.errors import StoreError
from honed.store.database import Database
from honed.store.schema import HEAD

SCRIPTS = Path(__file__).parent / "migrations"


def migrate(database: Database) -> None:
    """Upgrades to HEAD in one transaction. The caller holds a lock against a second migrating process.

    Raises StoreError, with nothing written, for a corrupt, foreign or newer database.
    """
    if database.is_sqlite:
        _inspect_file(database)
    revision = _revision(database)
    if revision == HEAD:
        return
    if revision is not None and revision not in known_revisions():
        raise StoreError(
            f"{database.name} was written by a newer honed (schema {revision}; this one knows up to {HEAD})."
            " Upgrade honed, or point [store] at another database; nothing was changed."
        )
    if database.is_sqlite:
        with database.named_errors(), closing(sqlite3.connect(_path(database))) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    database.write(_upgrade, durable=True)


def known_revisions() -> set[str]:
    """The revisions that this code ships."""
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(database: Database) -> str | None:
    with database.read() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def _inspect_file(database: Database) -> None:
    path = Path(_path(database))
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path} is no readable SQLite database: {error}. Restore it from a backup or move it away;"
            " nothing was changed."
        ) from error
    if tables and "alembic_version" not in tables:
        raise StoreError(
            f"{path} is a database that honed did not make (it holds {', '.join(sorted(tables)[:3])})."
            " Point [store] at another file; nothing was changed."
        )


def _path(database: Database) -> str:
    return database.url.database or ":memory:"
