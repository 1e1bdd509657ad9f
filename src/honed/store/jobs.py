"""What a loop remembers between steps, and the lock that keeps a second loop off its line.

The lock is the operating system's, on a file: a process that is killed lets go of it. A row names the holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from honed import codec
from honed.errors import StoreError
from honed.store.database import Database, upsert
from honed.store.schema import holders, jobs


class Jobs:
    """Small named values of a line, and its lock."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database = database
        self._folder = folder

    @contextlib.contextmanager
    def lock(self, line: str, owner: str) -> Iterator[None]:
        """Holds a line for the block. Raises StoreError, naming the holder's pid, when a live process has it."""
        path = self._folder / f"loop-{quote(line, safe='')}.lock"
        with file_lock(path) as taken:
            if not taken:
                raise StoreError(
                    f"the line {line!r} in {self._database.name} is held by {self._holder(line)} (lock file {path})."
                    " Stop that loop, or give this one another line or another [store] root."
                )
            row = {"line": line, "owner": owner, "host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}
            self._database.write(lambda connection: upsert(connection, holders, row))
            yield

    def put(self, line: str, key: str, value: dict[str, Any]) -> None:
        """Remembers a value (anything that msgpack holds, numpy arrays included) under a key."""
        row = {"line": line, "key": key, "value": codec.encode(value), "at": time.time()}
        self._database.write(lambda connection: upsert(connection, jobs, row))

    def get(self, line: str, key: str) -> dict[str, Any] | None:
        """What was put under a key; None for nothing."""
        query = sa.select(jobs.c.value).where(jobs.c.line == line, jobs.c.key == key)
        with self._database.read() as connection:
            value = connection.execute(query).scalar()
        return None if value is None else codec.decode(value, dict[str, Any])

    def keys(self, line: str) -> list[str]:
        """The keys that hold something, sorted."""
        query = sa.select(jobs.c.key).where(jobs.c.line == line).order_by(jobs.c.key)
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def delete(self, line: str, key: str) -> None:
        """Forgets a key, if it is there."""
        gone = sa.delete(jobs).where(jobs.c.line == line, jobs.c.key == key)
        self._database.write(lambda connection: connection.execute(gone))

    def _holder(self, line: str) -> str:
        with self._database.read() as connection:
            row = connection.execute(sa.select(holders).where(holders.c.line == line)).first()
        return "another process" if row is None else f"{row.owner!r} (pid {row.pid} on {row.host})"


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Holds an exclusive lock on a file for the block; yields False when another process (or block) has it.

    The file stays: deleting it would let two processes lock two files of one name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            taken = True
        except BlockingIOError:
            taken = False
        yield taken
    finally:
        os.close(descriptor)
