"""Opening, refusing, and several processes on one file."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from honed.errors import ConfigError, StoreError
from honed.store import Store, open_store
from honed.store.migrate import known_revisions
from honed.store.schema import HEAD, metadata
from honed.types import Version

from .nouns import captured, said, trace

FOLDER = Path(__file__).parent

WRITE = """
import sys
sys.path.insert(0, sys.argv[1])
from nouns import captured, said
from honed.store import open_store
from honed.types import Captured
name, num = sys.argv[3], int(sys.argv[4])
store = open_store(None, sys.argv[2])
for i in range(store.traces.offset(name), num):
    turn = captured(f"{name}-{i}", "shared", at=float(i))
    rating = Captured(feedback=said(f"{name}-f{i}", f"{name}-{i}", key=f"{name}-{i}"))
    store.traces.capture([turn, rating], name, i + 1)
    print(i, flush=True)
"""


def writer(root: Path, name: str, num: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITE, str(FOLDER), str(root), name, str(num)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_layout_of_a_fresh_store(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    with open_store(None, root) as store:
        store.blobs.write("x", b"1")
    assert (root / "honed.db").is_file()
    assert (root / "blobs" / "x").read_bytes() == b"1"
    assert (root / "run").stat().st_mode & 0o777 == 0o700
    with closing(sqlite3.connect(root / "honed.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_migrations_make_the_schema_that_the_code_reads(store: Store) -> None:
    engine = sa.create_engine(f"sqlite:///{store.root / 'honed.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all() == [HEAD]
    assert HEAD in known_revisions()


def test_what_older_versions_learned_from_gets_its_role(store: Store) -> None:
    store.traces.capture([captured("t1", "thanks")], "log", 1)
    store.traces.put(trace("shown", origin="demonstration"))
    store.traces.put(trace("attempt"))
    ids = ["attempt", "gone", "shown", "thanks"]
    store.versions.put(Version(line="support", number=1), {"practice": ids})
    root = store.root
    store.close()
    with closing(sqlite3.connect(root / "honed.db")) as connection:
        connection.execute("ALTER TABLE version_data DROP COLUMN role")
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
        connection.commit()
    with open_store(None, root) as again:
        roles = {
            id: role
            for role in ("demonstration", "replay", "practice")
            for id, _, _ in again.versions.sources("support@1", role=role)
        }
    assert roles == {"attempt": "practice", "gone": "practice", "shown": "demonstration", "thanks": "replay"}


@pytest.mark.parametrize("form", ["sqlite:///{path}", "{path}"])
def test_a_store_elsewhere(tmp_path: Path, form: str) -> None:
    path = tmp_path / "other" / "my.db"
    with open_store(form.format(path=path), tmp_path / "root") as store:
        store.traces.put(trace())
    assert path.is_file()
    assert not (tmp_path / "root" / "honed.db").exists()


@pytest.mark.parametrize("url", ["nosuch://x", "sqlite://", "sqlite:///:memory:", "://"])
def test_a_url_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"\[store\] url"):
        open_store(url, tmp_path)


def test_a_newer_database_is_refused_and_left_alone(store: Store) -> None:
    path = store.root / "honed.db"
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"{path} was written by a newer honed \(schema 9999.*Upgrade honed"):
        open_store(None, store.root)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    path.write_bytes(b"not a database, but somebody's only copy of something" * 100)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=f"{path} is no readable SQLite database"):
        open_store(None, tmp_path)
    assert path.read_bytes() == before


def test_somebody_elses_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "honed.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"did not make \(it holds bookmarks\)"):
        open_store(None, tmp_path)
    assert path.read_bytes() == before


def test_a_damaged_database_is_named(store: Store) -> None:
    store.traces.put(trace())
    store.close()
    path = store.root / "honed.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(StoreError, match=str(path)):
        open_store(None, store.root)


def test_a_table_that_breaks_while_in_use_is_named(store: Store) -> None:
    store.traces.put(trace())
    with closing(sqlite3.connect(store.root / "honed.db")) as connection:
        connection.execute("DROP TABLE turns")
    with pytest.raises(StoreError, match=f"{store.root / 'honed.db'} cannot be used: no such table"):
        store.traces.get("trace1")


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Set \[store\] root"):
        open_store(None, tmp_path / "file" / "root")


def test_a_database_that_stays_locked_is_an_error_that_says_so(tmp_path: Path) -> None:
    with open_store(None, tmp_path, busy_seconds=0.01) as store:
        with closing(sqlite3.connect(tmp_path / "honed.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="stayed locked by another process"):
                store.traces.put(trace())
            assert store.traces.count() == 0, "readers do not wait for a writer"
        store.traces.put(trace())


async def test_threads_share_a_store(store: Store) -> None:
    def work(i: int) -> None:
        store.traces.capture([captured(f"t{i}", "shared")], f"log{i}", i + 1)
        store.feedback.add([said(f"f{i}", f"t{i}")])
        store.traces.get("shared")

    await asyncio.gather(*(asyncio.to_thread(work, i) for i in range(60)))
    assert len({turn.id for turn in store.traces.get("shared").turns}) == 60
    assert len(store.feedback.live("support")) == 60


def test_two_processes_write_one_trace_of_one_fresh_store(tmp_path: Path) -> None:
    writers = [writer(tmp_path, name, 40) for name in ("a", "b")]
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    with open_store(None, tmp_path) as store:
        ids = [turn.id for turn in store.traces.get("shared").turns]
        assert sorted(ids) == sorted(f"{name}-{i}" for name in "ab" for i in range(40))
        assert [id for id in ids if id.startswith("a")] == [f"a-{i}" for i in range(40)], "each in its order"
        assert (store.traces.offset("a"), store.traces.offset("b")) == (40, 40)


def test_nothing_acknowledged_is_lost_or_doubled_by_kill_9(tmp_path: Path) -> None:
    acknowledged: set[str] = set()
    for round in range(5):
        with writer(tmp_path, "a", 10**6) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(random.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            lines = [first, *process.stdout.readlines()]
        acknowledged |= {f"a-{int(line)}" for line in lines if line.endswith("\n")}
        with open_store(None, tmp_path) as store:
            stored = [turn.id for turn in store.traces.get("shared").turns]
            assert stored == [f"a-{i}" for i in range(store.traces.offset("a"))], f"round {round}"
            assert len(store.feedback.list(limit=None)) == len(stored)
            assert acknowledged <= set(stored)
